"""The emulated GEMM: products of FP8 values in float32 accumulation, on the fastest unit that is exact for them.

Every FP8 value is a bfloat16 value, and so is an FP8 value times a power of two. A bfloat16 matrix unit multiplies them
exactly and accumulates in float32, which is what an FP8 tensor core does; its result is rounded to bfloat16, which is
what an FP8 GEMM writes under bfloat16 mixed precision. Where the processor has no bfloat16 unit, or block scales are not
powers of two, the products run in float32 and are not rounded.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from foundry_fp8.numerics.formats import E4M3
from foundry_fp8.numerics.quantize import Quantized

__all__ = ["scaled_mm", "to_dense"]


@functools.cache
def has_bf16_units(device_type: str) -> bool:
    """Whether bfloat16 products beat float32 ones: any GPU; a CPU with AVX512-BF16 or AMX."""
    if device_type != "cpu":
        return True
    features = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in features)


def to_dense(q: Quantized, *, power_2: bool) -> tuple[Tensor, Tensor | None]:
    """The operand as a matrix unit takes it.

    Args:
        q: The quantised operand, ``[R, C]``.
        power_2: Its block scales are powers of two (always for mxfp8), so that folding them in is exact.

    Returns:
        The values ``[R, C]`` in bfloat16 or float32 with block scales folded in, and the 0-d scale still to be applied
        to the product (``None`` where the scales are folded in).
    """
    bf16 = has_bf16_units(q.data.device.type) and (q.block is None or power_2)
    if q.block is None:
        return (_to_bf16(q) if bf16 else q.data.float()), q.gemm_scale
    if not bf16:
        return q.dequantize(), None
    rows, columns = q.data.shape
    block_rows, block_columns = q.block
    if rows % block_rows or columns % block_columns:
        return q.dequantize().bfloat16(), None
    values = _to_bf16(q)
    tiles = values.view(rows // block_rows, block_rows, columns // block_columns, block_columns)
    tiles.mul_(q.gemm_scale.bfloat16()[:, None, :, None])
    return values, None


def scaled_mm(
    a: tuple[Tensor, Tensor | None],
    b: tuple[Tensor, Tensor | None],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """``a @ b + bias`` of two operands from :func:`to_dense` (either transposed as needed), scaled, in ``out_dtype``."""
    (a_values, a_scale), (b_values, b_scale) = a, b
    common = torch.promote_types(a_values.dtype, b_values.dtype)
    product = a_values.to(common) @ b_values.to(common)
    # With a bias the epilogue runs in float32, so that the sum is rounded once.
    result = product.to(out_dtype if bias is None else torch.float32)
    scales = [s for s in (a_scale, b_scale) if s is not None]
    if scales:
        result.mul_(scales[0] if len(scales) == 1 else scales[0] * scales[1])
    return result if bias is None else result.add_(bias).to(out_dtype)


def _to_bf16(q: Quantized) -> Tensor:
    """The FP8 values in bfloat16, exactly.

    torch 2.7 converts FP8 on a CPU one element at a time. An FP8 number is a bfloat16 number with the exponent moved, so
    that shifting the bits and multiplying by the difference of the biases gives the same, subnormals included, ten times
    faster. Not so NaN, which the shift would turn into a number: a tensor that may hold one takes the plain way.
    """
    if q.data.device.type != "cpu" or not q.nan_free:
        return q.data.bfloat16()
    # E4M3 has 3 mantissa bits and bias 7, E5M2 has 2 and 15; bfloat16 has 7 and 127.
    shift, mask, exponent = (4, -0x7810, 120) if q.data.dtype == E4M3.dtype else (5, -0x7020, 112)
    bits = torch.empty(q.data.shape, dtype=torch.int16)
    bits.copy_(q.data.view(torch.int8))  # sign-extends; the mask clears the copies of the sign
    bits.bitwise_left_shift_(shift).bitwise_and_(mask)
    return bits.view(torch.bfloat16).mul_(2.0**exponent)
