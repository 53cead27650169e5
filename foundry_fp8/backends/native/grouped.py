"""The products of all experts as one autograd function: each operand is cast in one launch.

It computes what a linear of each expert would: an expert's x, weight and dy have one scale each (``current``), or all experts share
``delayed``'s. torch's grouped GEMM multiplies where it can (:mod:`foundry_fp8.compat.grouped_scaled_mm`: E4M3 times E4M3 on Hopper),
otherwise one GEMM an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_fp8.backends.native.inputs import Delayed, LinearCall
from foundry_fp8.backends.native.plan import FORMATS, Plan
from foundry_fp8.backends.native.products import defined, tensorwise_gemm
from foundry_fp8.backends.native.scaling import SCALINGS
from foundry_fp8.compat.fake_tensor import dry_run
from foundry_fp8.compat.grouped_scaled_mm import runs_grouped_mm, scaled_grouped_mm
from foundry_fp8.kernels.launch import GEMM_MULTIPLE, round_up
from foundry_fp8.layers.frozen_weight import in_dtype
from foundry_fp8.numerics.quantize import scale_from_amax

__all__ = ["GroupedLinear", "fits_grouped"]


def fits_grouped(call: LinearCall, x: Tensor, weights: Tensor) -> bool:
    """Whether :class:`GroupedLinear` takes this call: one scale an expert, bfloat16, whole 16-byte words, no probe, no dry run."""
    return (
        not dry_run()  # its kernels are no operators
        and SCALINGS[call.plan.kind].follows_amax
        and x.dtype == torch.bfloat16
        and weights.shape[1] % GEMM_MULTIPLE == weights.shape[2] % GEMM_MULTIPLE == 0
        and call.probe is None
        and call.fprop == call.dgrad == "fp8"
        and (call.wgrad == "fp8" or not weights.requires_grad)
    )


class Rows(NamedTuple):
    """Which rows are whose."""

    sizes: tuple[int, ...]
    counts: Tensor
    """``[experts]``: the same."""
    ends: Tensor
    """int32 ``[experts]``: where each expert's rows end."""
    padded_ends: Tensor
    """The same where each has a multiple of 16 rows."""
    group: Tensor
    """int32 ``[P]``: the expert of each row of that order."""
    source: Tensor
    """int32 ``[P]``: which row it is, -1 for padding."""

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> Rows:
        """For rows sorted by expert."""
        with_padding = [round_up(size) for size in sizes]
        counts, padded = torch.tensor([list(sizes), with_padding], dtype=torch.int64, device=device)
        ends, padded_ends = counts.cumsum(0), padded.cumsum(0)
        experts = torch.arange(len(sizes), device=device)
        group = torch.repeat_interleave(experts, padded, output_size=sum(with_padding))
        place = torch.arange(len(group), device=device) - (padded_ends - padded)[group]
        source = torch.where(place < counts[group], place + (ends - counts)[group], -1)
        return cls(tuple(sizes), counts, ends.int(), padded_ends.int(), group.int(), source.int())

    def product(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, fast_accumulation: bool
    ) -> Tensor:
        """``a_e @ b_e`` for the rows of each expert.

        Args:
            a: FP8 ``[R, C]``.
            a_scale: float32 ``[experts]``.
            b: FP8 ``[experts, C, N]``, C with stride 1.
            b_scale: float32 ``[experts]``.
            fast_accumulation: See :func:`~foundry_fp8.backends.native.products.tensorwise_gemm`.

        Returns:
            bfloat16 ``[R, N]``.
        """
        if _is_grouped(a, b):
            by_row = torch.repeat_interleave(a_scale, self.counts, output_size=len(a))
            by_column = b_scale[:, None].expand(-1, b.shape[2]).contiguous()
            return scaled_grouped_mm(a, by_row, b, by_column, self.ends, fast_accumulation=fast_accumulation)
        experts = zip(a.split(self.sizes), _apart(a_scale), b.unbind(), _apart(b_scale), strict=True)
        return torch.cat(
            [
                tensorwise_gemm(rows, scale, one.t(), one_scale, None, torch.bfloat16, fast_accumulation)
                for rows, scale, one, one_scale in experts
                if len(rows)
            ]
        )

    def weight_gradient(
        self, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, fast_accumulation: bool
    ) -> Tensor:
        """``dy_e @ x_e^T`` for the padded columns of each expert.

        Args:
            dy: FP8 ``[N, P]``.
            dy_scale: float32 ``[experts]``.
            x: FP8 ``[K, P]``.
            x_scale: float32 ``[experts]``.
            fast_accumulation: See :meth:`product`.

        Returns:
            bfloat16 ``[experts, N, K]``.
        """
        if _is_grouped(dy, x):
            by_row = dy_scale[:, None].expand(-1, len(dy)).reshape(-1)
            by_column = x_scale[:, None].expand(-1, len(x)).reshape(-1)
            made = scaled_grouped_mm(
                dy, by_row, x.t(), by_column, self.padded_ends, fast_accumulation=fast_accumulation
            )
        else:
            made = torch.empty((len(self.sizes), len(dy), len(x)), dtype=torch.bfloat16, device=dy.device)
            padded = [round_up(size) for size in self.sizes]
            experts = zip(
                dy.split(padded, 1), _apart(dy_scale), x.split(padded, 1), _apart(x_scale), strict=True
            )
            for out, size, given in zip(made, self.sizes, experts, strict=True):
                if size:
                    out.copy_(tensorwise_gemm(*given, None, torch.bfloat16, fast_accumulation))
        for out, size in zip(made, self.sizes, strict=True):
            if not size:  # nothing is added up, and torch leaves what was in memory
                out.zero_()
        return made


def _is_grouped(a: Tensor, b: Tensor) -> bool:
    """Whether torch's grouped GEMM multiplies these."""
    fits = a.dtype == b.dtype == torch.float8_e4m3fn
    return fits and not defined(a) and runs_grouped_mm(a.device)


def _apart(scales: Tensor) -> tuple[Tensor, ...]:
    """Each in 16 bytes of its own, which some of cuBLAS's FP8 paths ask of a scale."""
    spaced = scales.new_empty((len(scales), 4))
    spaced[:, 0] = scales
    return spaced[:, 0].unbind()


class _Cast(NamedTuple):
    data: Tensor | None
    data_t: Tensor | None
    scale: Tensor
    gemm_scale: Tensor


def _quantize(
    x: Tensor,
    group: Tensor,
    source: Tensor | None,
    experts: int,
    plan: Plan,
    fmt: str,
    delayed: Delayed = (None, None),
    known: tuple[Tensor, Tensor] | None = None,
    *,
    rows: bool,
    columns: bool,
    recorded: Tensor | None = None,
) -> _Cast:
    """Args are those of the kernels; ``known``: the scales that a forward found; ``recorded``: the experts whose amaxes are, if not all."""
    from foundry_fp8.kernels import grouped as kernels  # Triton is imported there, not before

    if known is None:
        scale, slot = delayed
        amax = kernels.group_amax(x, group, source, experts)
        if slot is not None:
            torch.fmax(slot, (amax if recorded is None else torch.where(recorded, amax, 0.0)).max(), out=slot)
        if scale is None:
            scale = scale_from_amax(amax, FORMATS[fmt], power_2=plan.power_2)
        else:
            scale = scale.expand(experts).contiguous()
        known = scale, torch.where(torch.isinf(amax), torch.nan, scale.reciprocal())
    made = kernels.quantize_groups(x, known[0], group, source, FORMATS[fmt], rows=rows, columns=columns)
    return _Cast(*made, *known)


class _Weights:
    """The weights of all experts, ``[experts, N, K]``, as the rows of one matrix, in the order in which they lie in memory."""

    def __init__(self, weights: Tensor, dtype: torch.dtype) -> None:
        self.flipped = not weights.is_contiguous() and weights.transpose(1, 2).is_contiguous()
        stored = in_dtype(weights.transpose(1, 2) if self.flipped else weights, dtype)
        self.experts, height, self.width = stored.shape
        self.matrix = stored.reshape(-1, self.width)
        self.group = torch.arange(len(self.matrix), device=weights.device, dtype=torch.int32) // height

    def cast(
        self,
        contracted: int,
        plan: Plan,
        delayed: Delayed = (None, None),
        known: tuple[Tensor, Tensor] | None = None,
        recorded: Tensor | None = None,
    ) -> _Cast:
        """As the second operand of the product that adds up over dimension ``contracted`` of ``[experts, N, K]``: ``[experts, C, out]``."""
        by_rows = (contracted == 2) != self.flipped
        found = _quantize(
            self.matrix, self.group, None, self.experts, plan, plan.x_fmt, delayed, known,
            rows=by_rows, columns=not by_rows, recorded=recorded,
        )  # fmt: skip
        if by_rows:
            assert found.data is not None
            operand = found.data.view(self.experts, -1, self.width).transpose(1, 2)
        else:
            assert found.data_t is not None
            operand = found.data_t.view(self.width, self.experts, -1).permute(1, 2, 0)
        return found._replace(data=operand, data_t=None)


class GroupedLinear(torch.autograd.Function):
    """``y_e = x_e W_e^T`` with the three GEMMs in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, sizes: Sequence[int], call: LinearCall) -> Tensor:
        """``x``: ``[R, K]`` bfloat16, sorted by expert; ``weights``: ``[experts, N, K]``, hp."""
        rows, plan = Rows.of(sizes, x.device), call.plan
        qx = _quantize(
            x, rows.group, rows.source, len(sizes), plan, plan.x_fmt, call.x, rows=True, columns=ctx.needs_input_grad[1]
        )  # fmt: skip
        qw = _Weights(weights, x.dtype).cast(2, plan, call.w, recorded=rows.counts > 0)
        assert qx.data is not None and qw.data is not None
        ctx.save_for_backward(weights, qx.data_t, qx.gemm_scale, qw.scale, qw.gemm_scale, *rows[1:])
        ctx.sizes, ctx.call = rows.sizes, call
        return rows.product(qx.data, qx.gemm_scale, qw.data, qw.gemm_scale, "fprop" in plan.fast)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Dgrad and wgrad, as far as they are needed."""
        weights, x_t, x_scale, w_scale, w_gemm_scale, *maps = ctx.saved_tensors
        call, rows = ctx.call, Rows(ctx.sizes, *maps)
        plan, (needs_x, needs_w) = call.plan, ctx.needs_input_grad[:2]
        if not (needs_x or needs_w):
            return None, None, None, None
        dy = in_dtype(dy, torch.bfloat16)
        qdy = _quantize(
            dy, rows.group, rows.source, len(rows.sizes), plan, plan.dy_fmt, call.dy, rows=needs_x, columns=needs_w
        )  # fmt: skip
        dx = dw = None
        if needs_x:
            qw = _Weights(weights, dy.dtype).cast(1, plan, known=(w_scale, w_gemm_scale))
            assert qdy.data is not None and qw.data is not None
            dx = rows.product(qdy.data, qdy.gemm_scale, qw.data, w_gemm_scale, "dgrad" in plan.fast)
        if needs_w:
            assert qdy.data_t is not None
            dw = rows.weight_gradient(qdy.data_t, qdy.gemm_scale, x_t, x_scale, "wgrad" in plan.fast)
            dw = in_dtype(dw, weights.dtype)
        return dx, dw, None, None
