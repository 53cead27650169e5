"""The FP8 number formats, and the cast into them.

Above a format's range ``torch.Tensor.to(float8)`` does what its release does: E4M3 above 464 became NaN until torch 2.11 and is 448 in
2.15, Inf included; E5M2 from 61440 on is Inf in both (``tests/numerics/test_casts.py``). The cast instructions of NVIDIA GPUs
saturate (``SATFINITE``). :func:`cast` saturates everywhere, so what is not finite has to be seen before it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

__all__ = ["E4M3", "E5M2", "E8M0_BIAS", "Float8Format", "cast", "e8m0_decode", "e8m0_round_up"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Format:
    """One FP8 layout. Values follow the OCP 8-bit floating point specification, as torch and TE implement it."""

    name: str
    dtype: torch.dtype
    max: float
    """Largest finite value."""
    min_normal: float
    """Smallest positive normal value; half of the smallest subnormal and everything below rounds to zero."""
    min_subnormal: float


E4M3 = Float8Format(
    name="e4m3", dtype=torch.float8_e4m3fn, max=448.0, min_normal=2.0**-6, min_subnormal=2.0**-9
)
E5M2 = Float8Format(
    name="e5m2", dtype=torch.float8_e5m2, max=57344.0, min_normal=2.0**-14, min_subnormal=2.0**-16
)

E8M0_BIAS = 127
"""An E8M0 byte ``e`` stands for ``2 ** (e - 127)``; 255 is NaN."""


def cast(x: Tensor, fmt: Float8Format) -> Tensor:
    """Cast to FP8, round to nearest even, saturating: ``|x| > max`` and Inf become ``max`` with the sign of ``x``.

    Args:
        x: Any shape, float32 (a float16 or bfloat16 tensor is widened first, which is exact).
        fmt: The format.

    Returns:
        Same shape, ``fmt.dtype``. NaN stays NaN.

    Source:
        ``__nv_cvt_float_to_fp8(..., __NV_SATFINITE, ...)`` of CUDA's ``cuda_fp8.hpp``.
    """
    # clamp keeps NaN; after it the cast cannot overflow, so the platform's own rounding is what is left.
    return x.float().clamp(-fmt.max, fmt.max).to(fmt.dtype)


def e8m0_round_up(x: Tensor) -> Tensor:
    """Encode positive float32 values as E8M0, rounding up to a power of two, saturating at ``2**127``.

    Args:
        x: Any shape, float32, not negative.

    Returns:
        Same shape, uint8: 0 for 0 and for values up to ``2**-127``, 255 for NaN, 254 for Inf, otherwise the biased
        exponent of the smallest power of two that is at least ``x``.

    Source:
        PTX ``cvt.rp.satfinite.ue8m0x2.f32`` as Transformer Engine spells it out in ``util/ptx.cuh`` (its
        ``float_to_e8m0``).
    """
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    # A float32 subnormal with mantissa up to 0x400000 is at most 2**-127, which is what code 0 stands for.
    round_up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    code = exponent + round_up.to(torch.int32)
    code = torch.where(torch.isinf(x), 254, code)
    code = torch.where(torch.isnan(x), 255, code)
    return code.to(torch.uint8)


def e8m0_decode(code: Tensor) -> Tensor:
    """The float32 values of E8M0 bytes: ``2 ** (code - 127)``, NaN for 255. ``code``: any shape, uint8."""
    bits = code.to(torch.int32) << 23
    bits = torch.where(code == 0, 0x400000, bits)  # 2**-127 is subnormal in float32
    bits = torch.where(code == 255, 0x7FC00000, bits)
    return bits.view(torch.float32)
