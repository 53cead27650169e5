"""Keeps Inf visible through Transformer Engine's casts.

TE's cast saturates: an Inf becomes the format's largest number, and with it an overflow disappears from gradient clipping,
loss scaling and the guards. NaN passes through. So one element of what enters (``dy``) or leaves (``y``) is made NaN
where the tensor that TE casts is not finite. It costs one read of ``x`` and one of ``dy``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["keep_non_finite"]


def keep_non_finite(y: Tensor, x: Tensor) -> Tensor:
    """Return ``y``, its storage changed: one element is NaN if ``x`` holds an Inf or NaN; likewise its gradient in backward.

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
