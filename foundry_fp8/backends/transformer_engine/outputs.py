"""What a linear of Transformer Engine's does not give: a weight gradient in high precision, and an Inf that stays visible.

Each returns ``y`` as it is, with a backward of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["keep_non_finite", "with_high_precision_wgrad"]


def with_high_precision_wgrad(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return ``y``; its backward gives ``weight`` the gradient ``dY^T X`` of unquantised operands.

    ``y`` was computed from ``weight.detach()``, so that only this contributes to the weight's gradient.

    Args:
        y: ``[M, N]``.
        x: ``[M, K]``, hp; kept for backward.
        weight: ``[N, K]``.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return y
    watched: Tensor = _HighPrecisionWgrad.apply(y, x.detach(), weight)  # type: ignore[no-untyped-call]
    return watched


class _HighPrecisionWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.reads_smoothly = True  # a product: activation compression may round x
        ctx.weight_dtype = weight.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor]:
        (x,) = ctx.saved_tensors
        with torch.autocast(dy.device.type, enabled=False):
            dw = dy.t() @ x.to(dy.dtype)
        return dy, None, dw.to(ctx.weight_dtype)


def keep_non_finite(y: Tensor, x: Tensor) -> Tensor:
    """Return ``y``, its storage changed: one element is NaN if ``x`` holds an Inf or NaN; likewise its gradient in backward.

    TE's cast saturates: an Inf becomes the format's largest number, and with it an overflow disappears from gradient clipping,
    loss scaling and the guards. NaN passes through. It costs one read of ``x`` and one of ``dy``.

    Args:
        y: ``[M, N]``, what was computed from ``x``; nothing else reads it.
        x: ``[M, K]``, hp.
    """
    kept: Tensor = _KeepNonFinite.apply(y, x.detach())  # type: ignore[no-untyped-call]
    return kept


class _KeepNonFinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor) -> Tensor:
        _mark(y, x)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dy = dy.contiguous()
        _mark(dy, dy)
        return dy, None


def _mark(target: Tensor, source: Tensor) -> None:
    """Add 0 to the first element of ``target``, or NaN if ``source`` is not finite.

    Past autograd's version counter: the value changes only where it is lost already.
    """
    zero_or_nan = source.sum(dtype=torch.float32) * 0.0
    target.data.view(-1)[:1].add_(zero_or_nan)
