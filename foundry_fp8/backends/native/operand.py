"""One operand of a GEMM in FP8: made by the kernels, multiplied by :mod:`foundry_fp8.backends.native.gemm`."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from foundry_fp8.numerics.formats import Float8Format
from foundry_fp8.numerics.quantize import Quantized, quantize_block, quantize_mx, with_amax
from foundry_fp8.numerics.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Gemm,
    MXFP8Scaling,
    Operand,
    Recipe,
    UnitScaling,
)

__all__ = ["Layout", "Plan", "Source", "gemm", "plan_of", "quantized_view"]


Granularity = Literal["tensor", "constant", "block", "mx"]

GRANULARITY: dict[str, Granularity] = {
    DelayedScaling.name: "tensor",
    CurrentScaling.name: "tensor",
    UnitScaling.name: "constant",
    BlockScaling.name: "block",
    MXFP8Scaling.name: "mx",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a recipe means for the kernels: plain values, so that a compiled graph can carry it."""

    granularity: Granularity
    x_fmt: str
    dy_fmt: str
    power_2: bool
    fast: tuple[Gemm, ...] = ()
    """The GEMMs that may be added up in the tensor cores' own accumulator."""
    gradient_scale: int | Literal["auto"] = 1
    """The constant scale of dy, where scales are constants."""
    alpha: float = 1.0
    """What every GEMM's result is multiplied by, where scales are constants."""

    def fmt(self, operand: Operand) -> str:
        """The name of the operand's number format."""
        return self.dy_fmt if operand == "dy" else self.x_fmt


def plan_of(recipe: Recipe, alpha: float = 1.0) -> Plan:
    """Read a recipe, for a layer with the output multiplier ``alpha``."""
    # By name, because Dynamo traces neither class patterns nor isinstance of a union.
    granularity = GRANULARITY.get(recipe.name)
    if granularity is None:
        raise TypeError(f"the native backend does not know the recipe {recipe!r}")
    power_2 = getattr(recipe, "power_2_scales", granularity == "mx")
    fast = getattr(recipe, "fast_accumulation", ())
    gradient_scale = getattr(recipe, "gradient_scale", 1)
    fmts = recipe.format("x").name, recipe.format("dy").name
    return Plan(granularity, *fmts, power_2, fast, gradient_scale, alpha)


class Layout(NamedTuple):
    """One of the two layouts of a quantised operand, contiguous along what its GEMM contracts."""

    data: Tensor
    scale: Tensor


class Source(NamedTuple):
    """The inputs of a kernel's tile producer (:class:`foundry_fp8.kernels.producers.Producer`) as an operator takes them."""

    x: Tensor
    up: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    alpha: Tensor | None = None
    kind: int = 0

    def amax_with(self, weight: Tensor) -> Tensor:
        """The amaxes of this and of a weight, float32 ``[2]``, in one launch."""
        from foundry_fp8.backends.native.ops import amax_of_two

        found: Tensor = amax_of_two(*self, weight)
        return found

    def quantize(
        self,
        operand: Operand,
        plan: Plan,
        *,
        rows: bool,
        columns: bool,
        column_sum: bool = False,
        scale: Tensor | None = None,
        known_amax: Tensor | None = None,
        amax_slot: Tensor | None = None,
    ) -> tuple[Layout, Layout, Tensor, Tensor]:
        """Quantise in one pass (current scaling: two).

        Args:
            operand: Which operand this is.
            plan: The recipe.
            rows: Make the layout that contracts over columns.
            columns: Make the transposed layout, which contracts over rows.
            column_sum: Sum the hp columns.
            scale: The scale, for delayed scaling.
            known_amax: Its first element is the amax, where current scaling has measured it before.
            amax_slot: Raised to the amax in place.

        Returns:
            The layout by rows, the transposed one (each with empty tensors if not made), the statistics (``[3]``: amax,
            gemm_scale, scale_inv; empty for block scales) and the column sum (empty if not asked for).
        """
        # Not `import ops`, which searches a package for a module at every call.
        from foundry_fp8.backends.native.ops import quantize_blockwise, quantize_tensorwise

        fmt = plan.dy_fmt if operand == "dy" else plan.x_fmt
        if plan.granularity == "tensor":
            data, data_t, stats, summed = quantize_tensorwise(
                *self, scale, known_amax, amax_slot, fmt, plan.power_2, rows, columns, column_sum
            )
            gemm_scale = stats.select(0, 1)
            return Layout(data, gemm_scale), Layout(data_t, gemm_scale), stats, summed
        if plan.granularity == "constant":
            constant = float(plan.gradient_scale) if operand == "dy" else 1.0
            # Each product gets alpha once: by x in fprop, by dy in dgrad and wgrad.
            alpha = 1.0 if operand == "w" else plan.alpha
            data, data_t, stats, summed = quantize_tensorwise(
                *self, None, None, None, fmt, False, rows, columns, column_sum, constant, alpha
            )
            by_rows, by_columns = stats.select(0, 1), stats.select(0, 2 if operand == "x" else 1)
            return Layout(data, by_rows), Layout(data_t, by_columns), stats, summed
        group = 128 if plan.granularity == "block" else 32
        square = group == 128 and operand == "w"
        data, gemm_scale, data_t, gemm_scale_t, summed = quantize_blockwise(
            *self, fmt, group, square, plan.power_2, rows, columns, column_sum
        )
        return Layout(data, gemm_scale), Layout(data_t, gemm_scale_t), self.x.new_empty((0,)), summed


def gemm(
    which: Gemm,
    a: Layout,
    b: Layout,
    plan: Plan,
    *,
    m: int,
    n: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """``a @ b.T + bias``, ``[m, n]``.

    Args:
        which: Which of a linear's products it is; in all but wgrad ``b`` is a weight, which block scaling quantises in
            squares.
        a: Contracted along its columns.
        b: The same.
        plan: The recipe.
        m: Rows of ``a`` without padding.
        n: Rows of ``b`` without padding.
        out_dtype: dtype of the result.
        bias: ``[n]``, hp.
    """
    from foundry_fp8.backends.native.gemm import blockwise_mm, mx_mm, tensorwise_mm

    if plan.granularity == "block":
        square = which != "wgrad"
        return blockwise_mm(
            a.data, a.scale, b.data, b.scale, m=m, n=n, out_dtype=out_dtype, bias=bias, square_b=square
        )
    if plan.granularity == "mx":
        return mx_mm(a.data, a.scale, b.data, b.scale, m=m, n=n, out_dtype=out_dtype, bias=bias)
    return tensorwise_mm(
        a.data,
        a.scale,
        b.data,
        b.scale,
        m=m,
        n=n,
        out_dtype=out_dtype,
        bias=bias,
        fast_accumulation=which in plan.fast,
    )


def quantized_view(
    x: Tensor, operand: Operand, plan: Plan, fmt: Float8Format, layout: Layout, stats: Tensor
) -> Quantized:
    """What a probe is shown.

    One scale a tensor: the very bytes of the GEMM. Blocks: the reference, which has the same bytes (the kernel tests say
    so) and the amaxes, which the kernels do not write.
    """
    if plan.granularity == "block":
        return quantize_block(x, (128, 128) if operand == "w" else (1, 128), fmt, power_2=plan.power_2)
    if plan.granularity == "mx":
        return quantize_mx(x, (1, 32), fmt)
    quantized = Quantized(layout.data[: x.shape[0], : x.shape[1]], stats[2], None, fmt, stats[0])
    return with_amax(quantized, x) if plan.granularity == "constant" else quantized
