"""FP8 bytes as the float32 numbers they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_fp8.backends.emulated.scratch import readable, scratch
from foundry_fp8.numerics.formats import E4M3
from foundry_fp8.numerics.quantize import Quantized

__all__ = ["dense_values"]

_SLAB = 1 << 18
"""Elements that are widened at a time: 1 MiB of float32, which stays in the cache from one pass to the next."""


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
