"""A scale a row, for each direction that a product contracts: ``current`` with ``granularity: row``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from foundry_fp8.backends.native.plan import FORMATS, Layout, Plan
from foundry_fp8.backends.native.scaling.base import NativeScaling, Output, Quantised
from foundry_fp8.backends.native.scaling.tensor import TensorKernels
from foundry_fp8.backends.native.source import Amaxes, Layouts, Source
from foundry_fp8.kernels.tensorwise import pad_to_multiple
from foundry_fp8.numerics.quantize import quantize_rows
from foundry_fp8.numerics.recipes import Gemm, Operand

__all__ = ["RowKernels"]

TENSOR = TensorKernels()


class RowKernels(NativeScaling):
    """torch's own operators quantise, which a compiler fuses; torch's GEMM multiplies."""

    kind: ClassVar[str] = "row"
    has_kernels: ClassVar[bool] = False

    def quantize(
        self, source: Source, operand: Operand, plan: Plan, layouts: Layouts, amaxes: Amaxes, *, direct: bool
    ) -> Quantised:
        """See :meth:`NativeScaling.quantize`."""
        x, nothing = source.reference(), source.x.new_empty((0,))
        summed = x.float().sum(0) if layouts.column_sum else nothing
        by_rows = _by_row(x, operand, plan) if layouts.rows else (nothing, nothing)
        return (
            by_rows,
            _by_row(x.t(), operand, plan) if layouts.columns else (nothing, nothing),
            nothing,
            summed,
        )

    def multiply(
        self, which: Gemm, a: Layout, b: Layout, plan: Plan, out: Output, bias: Tensor | None = None, *, direct: bool
    ) -> Tensor:  # fmt: skip
        """See :meth:`NativeScaling.multiply`."""
        a, b = (a[0], a[1][:, None]), (b[0], b[1][None])
        return TENSOR.multiply(which, a, b, plan, out, bias, direct=direct)

    def scales(self, layout: Layout, *, square: bool) -> Tensor:
        """See :meth:`NativeScaling.scales`."""
        return layout[1].double()[:, None]


def _by_row(x: Tensor, operand: Operand, plan: Plan) -> Layout:
    """``[R', C']`` padded with zeros, and a scale a row, ``[R']``."""
    q = quantize_rows(x, FORMATS[plan.fmt(operand)], along=1, power_2=plan.power_2)
    data = pad_to_multiple(q.data)
    return data, torch.nn.functional.pad(q.gemm_scale.flatten(), (0, len(data) - len(x)), value=1.0)
