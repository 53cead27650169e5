"""What one scaling is to the native backend."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from foundry_fp8.backends.native.plan import Layout, Plan
from foundry_fp8.backends.native.source import Amaxes, Layouts, Source
from foundry_fp8.layers.backend import Availability
from foundry_fp8.layers.frozen_weight import in_dtype
from foundry_fp8.numerics.recipes import Gemm, Operand

__all__ = ["Launch", "Made", "NativeScaling", "Output", "Quantised", "bias_inside", "with_bias"]

Quantised = tuple[Layout, Layout, Tensor, Tensor]
"""The layout by rows, the transposed one (each with empty tensors if not made), the statistics (``[3]``: amax, gemm_scale,
scale_inv; empty where blocks or rows have scales) and the column sum (empty if not asked for)."""

Launch = Callable[[tuple[object, ...], Any, Amaxes], Quantised]
"""Quantises, of the pointers that kernels take and a piece of :func:`~foundry_fp8.kernels.zeros.statistics` (``None`` for scales of
blocks); ``known`` may be the statistics of that piece."""


Output = tuple[int, int, torch.dtype]
"""Of a product ``a @ b.T``: rows of ``a`` and of ``b`` without padding; bfloat16, float16 or float32."""


class Made(NamedTuple):
    """What a kernel made, beside its definition."""

    kernel: str
    names: tuple[str, ...]
    """Of the outputs that are the same bits."""
    ours: Any
    reference: Any


class NativeScaling(abc.ABC):
    """How tensors with one kind of scales are quantised and multiplied.

    ``direct``: past torch's dispatcher, where :func:`~foundry_fp8.backends.native.ops.unnoticed` says so.
    """

    kind: ClassVar[str]
    follows_amax: ClassVar[bool] = False
    """Whether the one scale is that of an amax, measured before or recorded."""
    has_statistics: ClassVar[bool] = False
    joins: ClassVar[bool] = False
    """Whether :meth:`launch_together` puts several tensors into one launch."""
    has_kernels: ClassVar[bool] = True
    """Whether kernels of this package quantise; otherwise torch's operators."""
    product: ClassVar[str] = "torch._scaled_mm"
    """What multiplies, for messages."""

    def availability(self, device: torch.device, capability: tuple[int, int]) -> Availability:
        """Whether it runs on ``device``, a GPU of this ``capability`` that multiplies FP8."""
        return Availability(True)

    @abc.abstractmethod
    def quantize(
        self, source: Source, operand: Operand, plan: Plan, layouts: Layouts, amaxes: Amaxes, *, direct: bool
    ) -> Quantised:
        """Quantise ``source``, ``[R, C]``, which is that operand, in one pass (current scaling: two), through torch's operators."""

    def launch(self, source: Source, operand: Operand, plan: Plan, layouts: Layouts) -> Launch:
        """The same of all sources of one kind with unit strides along their rows; to be kept."""
        raise NotImplementedError

    def launch_together(
        self, launches: Sequence[Any]
    ) -> Callable[[Sequence[tuple[Any, ...]], Sequence[Any]], list[Quantised]]:
        """Several of :meth:`launch` at once: a function of each one's pointers, statistics and amaxes, in a row, and of the pieces."""
        raise NotImplementedError

    @abc.abstractmethod
    def multiply(
        self, which: Gemm, a: Layout, b: Layout, plan: Plan, out: Output, bias: Tensor | None = None, *, direct: bool
    ) -> Tensor:  # fmt: skip
        """One of a linear's three products, ``a @ b.T + bias``.

        Args:
            which: Which; in all but wgrad ``b`` is a weight.
            a: Contracted along its columns.
            b: The same.
            plan: The recipe.
            out: What results.
            bias: ``[n]``, hp.
            direct: See the class.

        Returns:
            ``[out[0], out[1]]``, contiguous.
        """

    @abc.abstractmethod
    def scales(self, layout: Layout, *, square: bool) -> Tensor:
        """What each element of a quantised operand is multiplied by, broadcastable to its padded data; float64.

        ``square``: block scales are of squares.
        """

    def both(
        self, source: Source, operand: Operand, plan: Plan, layouts: Layouts, amaxes: tuple[Amaxes, Amaxes]
    ) -> Made:
        """What the kernel makes of ``source``, and what its definition does; ``amaxes`` of each."""
        raise NotImplementedError


def bias_inside(bias: Tensor, padded_n: int, out_dtype: torch.dtype) -> Tensor | None:
    """The bias as the GEMM itself can add it: in the result's own 16-bit dtype, as long as the padded row; otherwise ``None``."""
    if out_dtype == torch.float32 or bias.dtype != out_dtype:
        return None
    return bias if len(bias) == padded_n else torch.nn.functional.pad(bias, (0, padded_n - len(bias)))


# torch.compile in torch 2.11 gives zeros as the gradients of an autograd.Function whose output is one tensor with an
# intermediate result: after a write in place, or a `to` that changes nothing (pytorch issue 180642). Hence neither below.


def with_bias(out: Tensor, bias: Tensor) -> Tensor:
    """The sum, rounded to the dtype of ``out``."""
    return in_dtype(out + bias, out.dtype)
