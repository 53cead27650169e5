"""Rounding to FP8 values that stay float32: what a GEMM's operand is once quantised, without the bytes between."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_fp8.numerics.formats import E4M3, Float8Format

__all__ = ["round_values_"]


def round_values_(x: Tensor, fmt: Float8Format, scratch: Tensor) -> Tensor:
    """``cast(x, fmt).float()`` in place: to nearest even, saturating, subnormals and NaN included.

    torch converts FP8 to float32 on a CPU one element at a time; these are six passes of plain arithmetic. Adding 1.5 times
    a power of two leaves as many bits behind the point as the format has at x's exponent, the addition rounds to them, and
    the subtraction is exact.

    Args:
        x: float32, contiguous; written.
        fmt: The format.
        scratch: int32, the shape of ``x``; written.

    Returns:
        ``x``.
    """
    # (mantissa bits, exponent field of the least normal number in float32)
    mantissa, least = (3, 127 - 6) if fmt is E4M3 else (2, 127 - 14)
    x.clamp_(-fmt.max, fmt.max)
    torch.bitwise_and(x.view(torch.int32), 0x7F800000, out=scratch)
    power = scratch.clamp_(min=least << 23).view(
        torch.float32
    )  # 2**exponent of x, at least that of the least normal
    shift = 1.5 * 2.0 ** (23 - mantissa)
    return x.add_(power, alpha=shift).sub_(power, alpha=shift)
