"""A norm that the linear behind it computes in its own kernel (``algorithms.fp8.fuse: true``).

Where a norm feeds exactly one converted linear, the norm returns its input and the linear normalises it. Modules and
parameter names stay. Each forward checks that the result is the same: the input and the norm's parameters must be in the
compute dtype (a low-precision norm casts both itself), and no tokens may be padded (a padded row would become the norm's
bias and count in an amax).

The last bit differs with the delayed recipe: TE quantises the norm's float32 result, not its bfloat16 rounding
(TE 2.20 ``csrc/extensions/normalization.cpp``).

``te.LayerNormMLP`` is not used: it needs the activation and both linears in one module, and its only GELU is the tanh form.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.linear import FP8Linear

__all__ = ["DeferredNorm", "defer", "deferred_norm_of", "qualified_name", "refusal"]

log = logging.getLogger(__name__)

_NORMS: dict[str, tuple[Literal["LayerNorm", "RMSNorm"], bool]] = {
    "torch.nn.modules.normalization.LayerNorm": ("LayerNorm", False),
    "torch.nn.modules.normalization.RMSNorm": ("RMSNorm", False),
    "llmfoundry.models.layers.norm.LPLayerNorm": ("LayerNorm", True),
    "llmfoundry.models.layers.norm.LPRMSNorm": ("RMSNorm", True),
}
"""Norm class -> TE's name for it, and whether it casts its input and parameters to the compute dtype itself."""

_ATTRIBUTE = "_deferred_norm"

_deferred_classes: dict[type, type] = {}


class DeferredNorm(nn.Module):
    """Mixin for a norm's class: lets the linear that reads the norm compute it, where the result is the same.

    Attributes:
        consumer: The linear that reads the norm.
        normalization: TE's name of the norm.
        low_precision: Whether it casts its input and parameters to the compute dtype itself.
        deferred: Whether the consumer computes the norm in the latest forward.
    """

    weight: Tensor
    bias: Tensor | None
    consumer: FP8Linear
    normalization: str
    low_precision: bool
    deferred: bool

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """``x`` itself where the consumer will normalise it, else its norm."""
        self.deferred = self.consumer.runs_fp8 and x.numel() > 0 and self._same_arithmetic(x)
        return x if self.deferred else super().forward(x)

    def normalise(self, x: Tensor) -> Tensor:
        """The norm of ``x``, computed by this module."""
        y: Tensor = super().forward(x)
        return y

    def _same_arithmetic(self, x: Tensor) -> bool:
        recipe = self.consumer.recipe
        assert recipe is not None
        dtype = compute_dtype(x)
        reason = None
        if x.numel() // x.shape[-1] % recipe.token_multiple:
            reason = f"its tokens are not a multiple of {recipe.token_multiple}"
        elif not self.low_precision and not (x.dtype == dtype == self.weight.dtype):
            reason = f"its input is {x.dtype} and its weight {self.weight.dtype}, but the linear computes in {dtype}"
        if reason is not None:
            _warn_not_fused(self.consumer.fqn, reason)
        return reason is None

    def tensors(self) -> dict[str, Tensor]:
        """The norm's parameters by their names in ``te.LayerNormLinear``, each ``[in_features]``."""
        found = {"layer_norm_weight": self.weight}
        if self.normalization == "LayerNorm":
            found["layer_norm_bias"] = torch.zeros_like(self.weight) if self.bias is None else self.bias
        return found


def deferred_norm_of(module: FP8Linear) -> DeferredNorm | None:
    """The norm that ``module`` computes in this forward, or ``None``."""
    norm = module.__dict__.get(_ATTRIBUTE)
    return norm if norm is not None and norm.deferred else None


def refusal(norm: Any, linear: FP8Linear) -> str | None:
    """Why ``linear`` cannot compute ``norm`` in its kernel, or ``None`` if it can."""
    name = type(norm).__name__
    if linear.wgrad == "high_precision":
        return "wgrad: high_precision reads the norm's output, which a fused kernel never writes"
    if qualified_name(type(norm)) not in _NORMS:
        return f"Transformer Engine has no norm that computes what {name} does"
    if norm.weight is None:
        return f"{name} has no weight, which Transformer Engine's norms have"
    if norm.eps is None:
        return f"{name} takes eps from the dtype, Transformer Engine wants a number"
    if tuple(norm.normalized_shape) != (linear.in_features,):
        return f"{name} normalises {tuple(norm.normalized_shape)}, the linear reads {linear.in_features} features"
    return None


def defer(norm: Any, linear: FP8Linear) -> DeferredNorm:
    """A :class:`DeferredNorm` with the parameters, buffers and hooks of ``norm``, for ``linear`` to compute."""
    cls = _deferred_class(type(norm))
    self: DeferredNorm = cls.__new__(cls)
    self.__dict__.update(norm.__dict__)
    self.__dict__["consumer"] = linear  # not as a submodule: the linear's parameters must get no second name
    self.normalization, self.low_precision = _NORMS[qualified_name(type(norm))]
    self.deferred = False
    linear.__dict__[_ATTRIBUTE] = self
    return self


def _deferred_class(cls: Any) -> Any:
    if cls not in _deferred_classes:
        _deferred_classes[cls] = type(f"Deferred{cls.__name__}", (DeferredNorm, cls), {})
    return _deferred_classes[cls]


def qualified_name(cls: type[Any]) -> str:
    """Module and name of ``cls``."""
    return f"{cls.__module__}.{cls.__qualname__}"


@functools.lru_cache(maxsize=1024)
def _warn_not_fused(fqn: str, reason: str) -> None:
    log.warning("%s is not fused with its norm in this forward: %s.", fqn, reason)
