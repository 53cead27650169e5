"""FP8 values as float32: the numbers that bytes stand for, what a GEMM's operand is once quantised, and the memory for both.

That memory is worked in again and again, because a fresh 32 MB buffer faults in page by page.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from foundry_fp8.compat.fake_tensor import FakeTensor
from foundry_fp8.numerics.formats import E4M3, Float8Format
from foundry_fp8.numerics.quantize import Quantized

__all__ = ["dense_values", "readable", "round_values_", "scratch"]

_SLAB = 1 << 18
"""Elements that are widened at a time: 1 MiB of float32, which stays in the cache from one pass to the next."""

_KEPT = 1 << 24
"""Elements of the largest buffer that is kept: 64 MiB. Larger ones are made anew each time."""

_buffers = threading.local()


def readable(x: Tensor) -> bool:
    """Whether values of ``x`` can be looked at for free: on a CPU, and not in a dry run on fake tensors."""
    return x.device.type == "cpu" and x.numel() > 0 and not isinstance(x, FakeTensor)


def scratch(name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """A float32 CPU tensor of ``shape``: the same memory at every call of this thread with this ``name``."""
    size = torch.Size(shape).numel()
    if size > _KEPT:
        return torch.empty(shape, dtype=torch.float32, device="cpu")
    buffer = getattr(_buffers, name, None)
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # a buffer made in an evaluation serves the training after it
            buffer = torch.empty(size, dtype=torch.float32, device="cpu")
        setattr(_buffers, name, buffer)
    return buffer[:size].view(shape)


def dense_values(q: Quantized, place: str = "a") -> Tensor:
    """The FP8 values of ``q``, unscaled, in float32, exactly; on a CPU in scratch memory called ``place``.

    torch converts FP8 on a CPU one element at a time. An FP8 number is a float32 number with the exponent moved, so that
    shifting the bits and multiplying by the difference of the biases gives the same, subnormals included, many times
    faster. Not so NaN, which the shift would turn into a number: a tensor that may hold one takes the plain way.
    """
    if not q.data.is_contiguous() and q.data.t().is_contiguous():
        return dense_values(q.t(), place).t()
    if not readable(q.data):
        return q.data.float()
    values = scratch(place, q.data.shape)
    if not q.nan_free:
        return values.copy_(q.data)
    # E4M3 has 3 mantissa bits and bias 7, E5M2 has 2 and 15; float32 has 23 and 127.
    shift, mask, exponent = (20, -0x78100000, 120) if q.data.dtype == E4M3.dtype else (21, -0x70200000, 112)
    rows = max(1, _SLAB // q.data.shape[1])
    bytes_, bits = q.data.view(torch.int8), values.view(torch.int32)
    for source, target in zip(bytes_.split(rows), bits.split(rows), strict=True):
        target.copy_(source)  # sign-extends; the mask clears the copies of the sign
        target.bitwise_left_shift_(shift).bitwise_and_(mask)
        target.view(torch.float32).mul_(2.0**exponent)
    return values


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
