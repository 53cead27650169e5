"""A scale for 128 elements along what a product contracts, or for a square of 128 x 128 of a weight: ``block``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_fp8.backends.native.ops import blockwise_gemm, quantize_blockwise
from foundry_fp8.backends.native.plan import FORMATS, Layout, Plan
from foundry_fp8.backends.native.scaling.base import Launch, Made, NativeScaling, Output, Quantised
from foundry_fp8.backends.native.source import Amaxes, Layouts, Source
from foundry_fp8.compat.block_scaled_mm import block_mode_missing
from foundry_fp8.kernels import blockwise
from foundry_fp8.layers.backend import Availability
from foundry_fp8.numerics.recipes import Gemm, Operand

__all__ = ["BlockKernels"]


class BlockKernels(NativeScaling):
    """torch's own block-scaled GEMM multiplies where there is one, otherwise Triton's."""

    kind: ClassVar[str] = "block"
    product: ClassVar[str] = "block_gemm"
    group: ClassVar[int] = 128
    squares: ClassVar[bool] = True
    """Whether weights have scales of squares."""

    def availability(self, device: torch.device, capability: tuple[int, int]) -> Availability:
        """Everywhere."""
        missing = block_mode_missing(device.index or 0)
        by = "cuBLASLt's" if missing is None else f"Triton's: {missing}"
        return Availability(True, f"its GEMMs are {by}")

    def quantize(
        self, source: Source, operand: Operand, plan: Plan, layouts: Layouts, amaxes: Amaxes, *, direct: bool
    ) -> Quantised:
        """See :meth:`NativeScaling.quantize`."""
        run = quantize_blockwise.direct if direct else quantize_blockwise
        square = self.squares and operand == "w"
        data, gemm_scale, data_t, gemm_scale_t, summed = run(
            *source, plan.fmt(operand), self.group, square, plan.power_2, *layouts
        )
        return (data, gemm_scale), (data_t, gemm_scale_t), source.x.new_empty((0,)), summed

    def launch(self, source: Source, operand: Operand, plan: Plan, layouts: Layouts) -> Launch:
        """See :meth:`NativeScaling.launch`."""
        options = {**layouts._asdict(), **self._options(operand, plan)}
        cast = blockwise.BlockCast(source, FORMATS[plan.fmt(operand)], **options)
        with torch.inference_mode(False):  # it may be saved for backward
            nothing = source.x.new_empty((0,))

        def run(pointers: tuple[object, ...], piece: None, amaxes: Amaxes) -> Quantised:
            data, by_rows, data_t, by_columns, summed = cast(pointers)
            return (data, by_rows), (data_t, by_columns), nothing, summed  # type: ignore[return-value]

        return run

    def multiply(
        self, which: Gemm, a: Layout, b: Layout, plan: Plan, out: Output, bias: Tensor | None = None, *, direct: bool
    ) -> Tensor:  # fmt: skip
        """See :meth:`NativeScaling.multiply`; :func:`foundry_fp8.kernels.block_gemm.block_gemm` says what the operands are."""
        run = blockwise_gemm.direct if direct else blockwise_gemm
        y: Tensor = run(*a, *b, bias, *out, which != "wgrad")
        return y

    def scales(self, layout: Layout, *, square: bool) -> Tensor:
        """See :meth:`NativeScaling.scales`."""
        data, scales = layout
        rows = scales.repeat_interleave(128, 0) if square else scales.t()
        return rows.repeat_interleave(128, 1).double()[: data.shape[0], : data.shape[1]]

    def both(
        self, source: Source, operand: Operand, plan: Plan, layouts: Layouts, amaxes: tuple[Amaxes, Amaxes]
    ) -> Made:
        """See :meth:`NativeScaling.both`."""
        given, fmt = {**layouts._asdict(), **self._options(operand, plan)}, FORMATS[plan.fmt(operand)]
        made = blockwise.quantize_blockwise(source, fmt, **given)
        reference = blockwise.quantize_blockwise_reference(source, fmt, **given)
        names = ("data", "gemm_scale", "data_t", "gemm_scale_t")
        return Made("quantize_blockwise", names, made, reference)

    def _options(self, operand: Operand, plan: Plan) -> dict[str, Any]:
        return {"group": self.group, "square": self.squares and operand == "w", "power_2": plan.power_2}
