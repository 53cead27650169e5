"""Norms that keep their input, packed or as it is, and two numbers a row.

The forward is the module's own expression, so it is exact. Backward uses the closed form on what was kept; who comes next, a
projection, need not keep the output, as backward can make it again (:mod:`.recompute`).

Source:
    COAT (arXiv:2410.19313) section 4 keeps norms' inputs in FP8 with per-group scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foundry_fp8.activations.compression.recompute import (
    MaybePacked,
    fuses,
    pack_if,
    repeatable,
    save_inputs,
    saved_inputs,
    unpacked,
)
from foundry_fp8.layers.autocast import autocast_type
from foundry_fp8.numerics.packed import Packed, PackFormat

__all__ = ["packed_norm"]


def packed_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Callable[[Tensor], Tensor],
    *,
    eps: float,
    centred: bool,
    fmt: PackFormat | None,
    gain: float = 1.0,
) -> Tensor:
    """``norm(x)``, a LayerNorm (``centred``) or RMSNorm over the last dimension, that keeps ``x`` and two numbers a row.

    Args:
        x: ``[..., D]``, hp.
        weight: ``[D]`` or ``None``.
        bias: ``[D]`` or ``None``.
        norm: Computes the output, weight and bias applied; for an exact forward.
        eps: Added to the variance.
        centred: Whether the mean is subtracted.
        fmt: How to pack; ``None`` keeps ``x`` as it is, and gradients are exact.
        gain: What ``norm`` multiplies with where it has no weight.
    """
    if not fuses(x):
        return norm(x)
    return _PackedNorm.apply(x, weight, bias, norm, eps, centred, fmt, gain)


class _PackedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Callable[[Tensor], Tensor],
        eps: float,
        centred: bool,
        fmt: PackFormat | None,
        gain: float,
    ) -> Tensor:
        mean: Tensor | None
        plain = x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        float32 = all(t is None or t.dtype == torch.float32 for t in (x, weight, bias))
        if centred and plain and float32:
            # What norm(x) runs; it gives the statistics along.
            y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
            kept = pack_if(x, fmt)
        else:
            y = norm(x)
            kept, mean, rstd = _keep_norm_input(x, fmt, eps, centred)
        ctx.shape, ctx.numel, ctx.dtype, ctx.gain = x.shape, x.numel(), x.dtype, gain
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.norm, ctx.recompute, ctx.output = repeatable(norm, x.device), _recompute_norm, None
        save_inputs(ctx, [kept], rstd, mean, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.output = None
        (kept,), (rstd, mean, weight) = saved_inputs(ctx)
        assert rstd is not None
        with torch.autocast(autocast_type(dy.device), enabled=False):
            dx, dw, db = _norm_gradients(dy.reshape(-1, dy.shape[-1]), kept, rstd, mean, weight)
            if ctx.gain != 1.0:
                dx *= ctx.gain
        return (
            dx.view(ctx.shape),
            None if weight is None else dw.to(weight.dtype),
            None if ctx.bias_dtype is None else db.to(ctx.bias_dtype),
            *(None,) * 5,
        )


def _recompute_norm(ctx: Any) -> Tensor:
    """The norm's output; held until the norm's own backward, as query, key and value projections each ask for it."""
    if ctx.output is None:
        ((kept,), _) = saved_inputs(ctx)
        ctx.output = ctx.norm(unpacked(kept, ctx.shape))
    output: Tensor = ctx.output
    return output


def _norm_kernels(x: Tensor, fmt: PackFormat | None) -> bool:
    """Whether the Triton kernels take the norm of ``x`` ``[R, C]``."""
    if not x.is_cuda or (fmt is not None and fmt.name == "int4"):
        return False
    from foundry_fp8.kernels.norms import MAX_COLUMNS

    return x.shape[1] <= MAX_COLUMNS


def _keep_norm_input(
    x: Tensor, fmt: PackFormat | None, eps: float, centred: bool
) -> tuple[MaybePacked, Tensor | None, Tensor]:
    """``x`` ``[..., C]`` packed or as it is; the mean of its rows (``None`` unless centred) and their reciprocal root.

    The backward of a norm that computes in bfloat16 uses its statistics too; float32 ones are closer to the truth.
    """
    rows = x.reshape(-1, x.shape[-1])
    if _norm_kernels(rows, fmt):
        from foundry_fp8.kernels.norms import norm_statistics, pack_norm_input

        if fmt is None:
            return x, *norm_statistics(rows, eps, centered=centred)
        return pack_norm_input(rows, fmt.within(rows.shape[1]), eps, centered=centred)
    if centred:
        _, mean, rstd = torch.native_layer_norm(rows.float(), rows.shape[1:], None, None, eps)
        return pack_if(x, fmt), mean, rstd
    # The only reduction over rows that is one vectorised pass on a CPU.
    root = torch.linalg.vector_norm(rows, 2, 1, dtype=torch.float32)
    return pack_if(x, fmt), None, torch.rsqrt(root.square() / rows.shape[1] + eps)


def _norm_gradients(
    dy: Tensor, kept: MaybePacked, rstd: Tensor, mean: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``dx`` in the dtype of the input, and the float32 gradients of weight and bias (empty without ``mean``); ``dy`` is ``[R, C]``."""
    if _norm_kernels(dy, kept.fmt if isinstance(kept, Packed) else None):
        from foundry_fp8.kernels.norms import norm_backward

        x = kept if isinstance(kept, Packed) else kept.reshape(dy.shape)
        return norm_backward(dy, x, rstd, weight, mean=mean)
    dtype, dy, x = kept.dtype, dy.float(), unpacked(kept, dy.shape).float()
    if mean is not None:
        gain = dy.new_ones(dy.shape[1]) if weight is None else weight.float()
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            dy, x, [dy.shape[1]], mean.view(-1, 1), rstd.view(-1, 1), gain, gain, [True, True, True]
        )
        return dx.to(dtype), dw, db
    normed = x * rstd[:, None]
    dw = (dy * normed).sum(0)
    dnormed = dy if weight is None else dy * weight.float()
    dx = torch.addcmul(dnormed, normed, (dnormed * normed).mean(1, keepdim=True), value=-1.0)
    return dx.mul_(rstd[:, None]).to(dtype), dw, dw.new_empty(0)
