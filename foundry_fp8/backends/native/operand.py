"""One operand of a GEMM in FP8: made by the kernels, multiplied by :mod:`foundry_fp8.backends.native.gemm`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foundry_fp8.backends.native import gemm as products
from foundry_fp8.backends.native.ops import amax_of_two, quantize_blockwise, quantize_tensorwise
from foundry_fp8.backends.native.plan import FORMATS, Layout, Plan
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.kernels.tensorwise import pad_to_multiple
from foundry_fp8.numerics.quantize import quantize_rows
from foundry_fp8.numerics.recipes import Gemm, Operand

__all__ = ["Source", "gemm"]


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

    def amax_with(self, weight: Tensor, *, direct: bool) -> tuple[Tensor, Tensor]:
        """The amaxes of this and of a weight, each the first of three float32 elements, in one launch."""
        run = amax_of_two.direct if direct else amax_of_two
        found: tuple[Tensor, Tensor] = run(*self, weight)
        return found

    def quantize(
        self,
        operand: Operand,
        plan: Plan,
        *,
        direct: bool,
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
            direct: Past torch's dispatcher, where :func:`~foundry_fp8.backends.native.ops.unnoticed` says so.
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
        fmt = plan.fmt(operand)
        if plan.granularity == "row":
            x, nothing = Producer(*self).reference(), self.x.new_empty((0,))
            summed = x.float().sum(0) if column_sum else nothing
            by_rows = _by_row(x, plan, fmt) if rows else (nothing, nothing)
            return by_rows, _by_row(x.t(), plan, fmt) if columns else (nothing, nothing), nothing, summed
        if plan.granularity == "tensor" or plan.granularity == "constant":
            run = quantize_tensorwise.direct if direct else quantize_tensorwise
            if plan.granularity == "tensor":
                data, data_t, stats, summed = run(
                    *self, scale, known_amax, amax_slot, fmt, plan.power_2, rows, columns, column_sum
                )
                gemm_scale = stats.select(0, 1)
                return (data, gemm_scale), (data_t, gemm_scale), stats, summed
            constant, alpha = plan.constants(operand)
            data, data_t, stats, summed = run(
                *self, None, None, None, fmt, False, rows, columns, column_sum, constant, alpha
            )
            by_rows, by_columns = stats.select(0, 1), stats.select(0, 2 if operand == "x" else 1)
            return (data, by_rows), (data_t, by_columns), stats, summed
        run = quantize_blockwise.direct if direct else quantize_blockwise
        group, square = plan.blocks(operand)
        data, gemm_scale, data_t, gemm_scale_t, summed = run(
            *self, fmt, group, square, plan.power_2, rows, columns, column_sum
        )
        return (data, gemm_scale), (data_t, gemm_scale_t), self.x.new_empty((0,)), summed


def _by_row(x: Tensor, plan: Plan, fmt: str) -> Layout:
    """``[R', C']`` padded with zeros, and a scale a row, ``[R']``; in torch's operators, which a compiler fuses."""
    q = quantize_rows(x, FORMATS[fmt], along=1, power_2=plan.power_2)
    data = pad_to_multiple(q.data)
    return data, torch.nn.functional.pad(q.gemm_scale.flatten(), (0, len(data) - len(x)), value=1.0)


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
    direct: bool,
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
        direct: Past torch's dispatcher, as in :meth:`Source.quantize`.
    """
    if plan.granularity == "block":
        square = which != "wgrad"
        return products.blockwise_mm(
            *a, *b, m=m, n=n, out_dtype=out_dtype, bias=bias, square_b=square, direct=direct
        )
    if plan.granularity == "mx":
        return products.mx_mm(*a, *b, m=m, n=n, out_dtype=out_dtype, bias=bias)
    if plan.granularity == "row":
        a, b = (a[0], a[1][:, None]), (b[0], b[1][None])
    return products.tensorwise_mm(
        *a,
        *b,
        m=m,
        n=n,
        out_dtype=out_dtype,
        bias=bias,
        fast_accumulation=which in plan.fast,
        direct=direct,
    )
