"""What a backend is: the code that runs the three GEMMs of a converted linear.

========= =============================== ==============
GEMM      equation                        contracts over
========= =============================== ==============
fprop     ``Y[M,N] = X[M,K] W[N,K]^T``    K, in_features
dgrad     ``dX[M,K] = dY[M,N] W[N,K]``    N, out_features
wgrad     ``dW[N,K] = dY[M,N]^T X[M,K]``  M, tokens
========= =============================== ==============
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.shared_inputs import SharedInputs
from foundry_fp8.numerics.recipes import Recipe

if TYPE_CHECKING:
    from foundry_fp8.layers.attention import AttentionBackend
    from foundry_fp8.layers.grouped_linear import FP8GroupedLinear
    from foundry_fp8.layers.linear import FP8Linear

__all__ = ["DEFAULT_OPTIONS", "Availability", "Backend", "BackendOptions"]


@dataclasses.dataclass(frozen=True)
class Availability:
    """Whether something can run here; if not, why, and what would make it run; if it can, maybe by what."""

    ok: bool
    reason: str = ""
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class BackendOptions:
    """What one conversion asks of its backend beside recipes."""

    only_where_faster: bool = False
    """Leave layers in high precision that are predicted to be no faster in FP8, as ``recipe: auto`` does. A backend that predicts
    nothing ignores it."""
    accumulation: Literal["float32", "hopper"] = "float32"
    """How a backend that emulates adds products up: in float32, or bit for bit as Hopper's tensor cores do under the recipe's
    ``fast_accumulation``. Hardware does what it does."""
    cache_weights: bool | Literal["auto"] = False
    """Quantise each weight once per optimizer step; ``auto``: once for a forward and its backward, where there is room."""


DEFAULT_OPTIONS = BackendOptions()


class Backend(abc.ABC):
    """Runs FP8 linears. One instance serves a whole model.

    Args:
        options: What the conversion asks for; what is in :attr:`lacks` was refused before.
    """

    name: ClassVar[str]
    lacks: ClassVar[Mapping[str, str]] = {
        "accumulation": "it is for backend: emulated, since hardware adds up in its own way. Remove it, and choose with the recipe's fast_accumulation",
        "cache_weights": "it quantises them in every forward. Set it to false, or backend: native",
        "gemms": "fprop and dgrad run the recipe there, and no GEMM is dequantized. Remove it, or set backend: native",
        "fuse": "it fuses nothing; native does. Leave it at auto",
    }
    """The options of ``algorithms.fp8`` that it does not have, each with why and the way out: all that is more than products, unless it says
    otherwise. One that fuses computes norms and activations before its linears (:class:`~foundry_fp8.layers.produced.Produced`)."""

    def __init__(self, options: BackendOptions = DEFAULT_OPTIONS) -> None:
        self.options = options

    @functools.cached_property
    def inputs(self) -> SharedInputs:
        """What has been made of the inputs of the running forward; for backends that keep them themselves."""
        return SharedInputs()

    @abc.abstractmethod
    def availability(self, recipe: Recipe, device: torch.device) -> Availability:
        """Whether this backend can run ``recipe`` on ``device`` with what is installed."""

    def recipe_reason(self, recipe: Recipe) -> str | None:
        """Why it runs ``recipe`` on no device, or ``None``."""
        return None

    @abc.abstractmethod
    def linear(self, module: FP8Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x weight^T + bias`` under ``module.recipe`` (never ``None`` here), differentiable.

        Args:
            module: Its recipe, slots and probe are read at each call.
            x: ``[..., K]``, hp.
            weight: ``[N, K]``: the module's, or under tensor parallelism this rank's part of it; not always contiguous.
            bias: ``[N]``.

        Returns:
            ``[..., N]`` in the compute dtype (:func:`compute_dtype`).
        """

    def experts_reason(self) -> str | None:
        """Why it runs no experts whose weights are one parameter (:meth:`grouped_linear`), or ``None`` if it does."""
        return f"the {self.name} backend runs no experts in one parameter"

    def grouped_linear(
        self, layer: FP8GroupedLinear, x: Tensor, weights: Tensor, sizes: Sequence[int]
    ) -> Tensor:
        """``x_e W_e^T`` for the rows ``x_e`` of each expert, differentiable.

        Args:
            layer: Its recipe, slots and probe are read at each call.
            x: ``[rows, in_features]``, hp, sorted by expert, not empty.
            weights: ``[experts, out_features, in_features]``, hp; may be a transposed view.
            sizes: Rows of each expert; some may have none.

        Returns:
            ``[rows, out_features]`` in the compute dtype.
        """
        raise NotImplementedError(self.experts_reason())

    def shape_reason(self, recipe: Recipe, in_features: int, out_features: int) -> str | None:
        """Why ``recipe`` cannot take a layer of this shape, or ``None`` if it can."""
        multiple = recipe.shape_multiple
        for label, size in (("in_features", in_features), ("out_features", out_features)):
            if size % multiple:
                return f"{label}={size} is not a multiple of {multiple}, which the {recipe.name} recipe needs"
        return None

    def attention(self) -> AttentionBackend:
        """What runs FP8 attention beside it.

        Raises:
            ConfigError: It has none.
        """
        raise ConfigError(
            f"algorithms.fp8.attention: the {self.name} backend has no FP8 attention. Set attention: false."
        )

    def self_check(  # noqa: B027 - optional
        self, recipe: Recipe, dtype: torch.dtype, device: torch.device, *, fused: bool, experts: bool
    ) -> None:
        """Prove on ``device`` what a conversion is about to rely on, before anything is changed.

        Args:
            recipe: What the model will run.
            dtype: Its compute dtype, as far as its parameters show.
            device: The one that will run it.
            fused: Norms will be computed in the linears' kernels.
            experts: There are experts in one parameter.

        Raises:
            RuntimeError: Something computes wrongly there.
        """

    def before_forward(self, model: nn.Module) -> None:  # noqa: B027
        """A forward of the whole ``model`` begins."""

    def attach(self, module: FP8Linear) -> None:  # noqa: B027
        """Prepare per-module state once, when ``module`` is made."""

    def forward_context(self, recipe: Recipe) -> AbstractContextManager[None]:
        """Entered around every forward of the whole model."""
        return nullcontext()
