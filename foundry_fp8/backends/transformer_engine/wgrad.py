"""The weight gradient in high precision, beside a forward whose GEMMs are someone else's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["with_high_precision_wgrad"]


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
