"""One scale a tensor: measured (current), of earlier passes (delayed), or constant (unit)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_fp8.backends.native import products
from foundry_fp8.backends.native.ops import quantize_tensorwise, tensorwise_gemm
from foundry_fp8.backends.native.plan import FORMATS, Layout, Plan
from foundry_fp8.backends.native.products import without_padding
from foundry_fp8.backends.native.scaling.base import (
    Launch,
    Made,
    NativeScaling,
    Output,
    Quantised,
    bias_inside,
    with_bias,
)  # fmt: skip
from foundry_fp8.backends.native.source import Amaxes, Layouts, Source
from foundry_fp8.kernels import tensorwise
from foundry_fp8.kernels.zeros import Statistics
from foundry_fp8.layers.frozen_weight import in_dtype
from foundry_fp8.numerics.recipes import Gemm, Operand

__all__ = ["ConstantKernels", "TensorKernels", "tensorwise_mm"]


class TensorKernels(NativeScaling):
    """``current`` and ``delayed``."""

    kind: ClassVar[str] = "tensor"
    follows_amax: ClassVar[bool] = True
    has_statistics: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    def options(self, operand: Operand, plan: Plan) -> tuple[bool, float | None, float]:
        """Whether scales are powers of two; a constant scale, if there is one; what the GEMM scale is multiplied by."""
        return plan.power_2, None, 1.0

    def scale_t(self, operand: Operand) -> int:
        """Which of the statistics is the GEMM scale of the transposed layout."""
        return 1

    def quantize(
        self, source: Source, operand: Operand, plan: Plan, layouts: Layouts, amaxes: Amaxes, *, direct: bool
    ) -> Quantised:
        """See :meth:`NativeScaling.quantize`."""
        run = quantize_tensorwise.direct if direct else quantize_tensorwise
        power_2, constant, alpha = self.options(operand, plan)
        data, data_t, stats, summed = run(
            *source, *amaxes, plan.fmt(operand), power_2, *layouts, constant, alpha
        )
        return (data, stats.select(0, 1)), (data_t, stats.select(0, self.scale_t(operand))), stats, summed

    def launch(self, source: Source, operand: Operand, plan: Plan, layouts: Layouts) -> Launch:
        """See :meth:`NativeScaling.launch`."""
        cast = tensorwise.Cast(source, FORMATS[plan.fmt(operand)], **self._options(operand, plan, layouts))
        return _TensorLaunch(cast, self.scale_t(operand))

    def launch_together(
        self, launches: Sequence[Any]
    ) -> Callable[[Sequence[tuple[Any, ...]], Sequence[Any]], list[Quantised]]:
        """See :meth:`NativeScaling.launch_together`."""
        casts = tensorwise.Casts([one.cast for one in launches])

        def run(given: Sequence[tuple[Any, ...]], pieces: Sequence[Any]) -> list[Quantised]:
            return [
                one.quantised(piece, made)
                for one, piece, made in zip(launches, pieces, casts(given), strict=True)
            ]

        return run

    def multiply(
        self, which: Gemm, a: Layout, b: Layout, plan: Plan, out: Output, bias: Tensor | None = None, *, direct: bool
    ) -> Tensor:  # fmt: skip
        """See :meth:`NativeScaling.multiply`."""
        m, n, out_dtype = out
        return tensorwise_mm(
            *a, *b, m=m, n=n, out_dtype=out_dtype, bias=bias, fast_accumulation=which in plan.fast, direct=direct
        )  # fmt: skip

    def scales(self, layout: Layout, *, square: bool) -> Tensor:
        """See :meth:`NativeScaling.scales`."""
        return layout[1].double()

    def both(
        self, source: Source, operand: Operand, plan: Plan, layouts: Layouts, amaxes: tuple[Amaxes, Amaxes]
    ) -> Made:
        """See :meth:`NativeScaling.both`."""
        functions = tensorwise.quantize_tensorwise, tensorwise.quantize_tensorwise_reference
        fmt, options = FORMATS[plan.fmt(operand)], self._options(operand, plan, layouts)
        made = (
            function(source, fmt, scale=scale, known_amax=known, amax_slot=slot, **options)
            for function, (scale, known, slot) in zip(functions, amaxes, strict=True)
        )
        return Made("quantize_tensorwise", ("data", "data_t", "stats"), *made)

    def _options(self, operand: Operand, plan: Plan, layouts: Layouts) -> dict[str, Any]:
        power_2, constant, alpha = self.options(operand, plan)
        return {"power_2": power_2, "constant": constant, "alpha": alpha, **layouts._asdict()}


@dataclasses.dataclass(frozen=True, slots=True)
class _TensorLaunch:
    """What :meth:`TensorKernels.launch` keeps."""

    cast: tensorwise.Cast
    scale_t: int

    def __call__(self, pointers: tuple[object, ...], piece: Statistics, amaxes: Amaxes) -> Quantised:
        return self.quantised(piece, self.cast(pointers, piece.stats, *amaxes))

    def quantised(self, piece: Statistics, made: tuple[Any, ...]) -> Quantised:
        """What the cast made, with its scales."""
        (stats, by_rows), (data, data_t, summed) = piece, made
        by_columns = by_rows if self.scale_t == 1 else stats.select(0, self.scale_t)
        return (data, by_rows), (data_t, by_columns), stats, summed


class ConstantKernels(TensorKernels):
    """``unit``. Each product has a layer's output multiplier once: from x in fprop, from dy in dgrad and wgrad."""

    kind: ClassVar[str] = "constant"
    follows_amax: ClassVar[bool] = False

    def options(self, operand: Operand, plan: Plan) -> tuple[bool, float | None, float]:
        """See :meth:`TensorKernels.options`."""
        constant = float(plan.gradient_scale) if operand == "dy" else 1.0
        return False, constant, 1.0 if operand == "w" else plan.alpha

    def scale_t(self, operand: Operand) -> int:
        """See :meth:`TensorKernels.scale_t`: for x the one without the multiplier."""
        return 2 if operand == "x" else 1


def tensorwise_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    m: int,
    n: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accumulation: bool = False,
    direct: bool = False,
) -> Tensor:
    """``(a @ b.T) * a_scale * b_scale + bias``, without padding.

    Args:
        a: FP8 ``[M', K]``, contiguous.
        a_scale: One float32 element, or ``[M', 1]``, one a row; what leads out of FP8.
        b: FP8 ``[N', K]``, contiguous.
        b_scale: The same for ``b``, or ``[1, N']``.
        m: Rows of the result.
        n: Columns of the result.
        out_dtype: bfloat16, float16 or float32.
        bias: ``[n]``, hp.
        fast_accumulation: Let Hopper's tensor cores accumulate in their own, shorter format.
        direct: Nothing compiles, which the caller has asked.

    Returns:
        ``[m, n]``, contiguous, ``out_dtype``.
    """
    by_row = a_scale.dim() == 2
    made = torch.bfloat16 if by_row else out_dtype  # torch's GEMM of rows writes nothing else
    inside = None if bias is None else bias_inside(bias, b.shape[0], made)
    run = products.tensorwise_gemm if direct or not torch.compiler.is_compiling() else tensorwise_gemm
    out = without_padding(run(a, a_scale, b, b_scale, inside, made, fast_accumulation), m, n)
    if by_row:
        out = in_dtype(out, out_dtype)
    return out if bias is None or inside is not None else with_bias(out, bias)
