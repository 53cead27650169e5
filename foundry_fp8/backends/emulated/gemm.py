"""The emulated GEMM: exact products of FP8 values, added up in float32 or as Hopper does it, scaled in float32, rounded once.

Every FP8 value is a bfloat16 value, and so is an FP8 value times a power of two. So matrix units for bfloat16 (or TF32)
form the products exactly and add them up in float32; block scales that are not powers of two take plain float32 products.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from foundry_fp8.backends.emulated.dense import dense_values
from foundry_fp8.backends.emulated.hopper import hopper_mm
from foundry_fp8.backends.emulated.scratch import readable, scratch
from foundry_fp8.compat.float32_products import float32_products
from foundry_fp8.numerics.quantize import Quantized

__all__ = ["Sums", "has_bf16_units", "scaled_mm"]

Sums = Literal["float32", "hopper_fast", "hopper_precise"]
"""How the products are added up: in float32, or as :mod:`foundry_fp8.backends.emulated.hopper` says."""


@functools.cache
def has_bf16_units(device_type: str) -> bool:
    """Whether bfloat16 products beat float32 ones: any GPU; a CPU with AVX512-BF16 or AMX."""
    if device_type != "cpu":
        return True
    features = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in features)


def scaled_mm(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    power_2: bool,
    sums: Sums = "float32",
    alpha: float = 1.0,
) -> Tensor:
    """``alpha * a @ b.T + bias``.

    Args:
        a: ``[M, K]``.
        b: ``[N, K]``.
        out_dtype: What the result is rounded to, from float32.
        bias: ``[N]``, hp; added in float32.
        power_2: Block scales are powers of two (always for mxfp8).
        sums: How the products are added up.
        alpha: Multiplies the sums, as part of their scale; of operands with one scale a tensor.

    Returns:
        ``[M, N]``, NaN where an operand's scale says that it held an Inf.
    """
    # A selective checkpoint keeps what a matmul returned, and that must not be written to; scratch memory may be.
    own = None
    if sums == "float32":
        temporary = out_dtype != torch.float32 and readable(a.data) and readable(b.data)
        own = scratch("product", (a.data.shape[0], b.data.shape[0])) if temporary else None
        product = _float32_mm(a, b, out=own, narrow=a.block is None or power_2)
    else:
        product = hopper_mm(a, b, fast=sums == "hopper_fast")
    if a.block is None:
        product = own = torch.mul(product, a.gemm_scale * b.gemm_scale * alpha, out=own)
    if bias is not None:
        product = torch.add(product, bias, out=own)
    return product.to(out_dtype)


def _float32_mm(a: Quantized, b: Quantized, *, out: Tensor | None, narrow: bool) -> Tensor:
    """``a @ b.T`` in float32 with block scales applied.

    Args:
        a: ``[M, K]``.
        b: ``[N, K]``.
        out: Where to put it; ``None`` for memory of its own.
        narrow: The scaled values are bfloat16 values.
    """
    left, right = _scaled_values(a, "a"), _scaled_values(b, "b")
    device_type = left.device.type
    with float32_products(device_type, narrow=narrow and has_bf16_units(device_type)):
        return torch.mm(left, right.t(), out=out)


def _scaled_values(q: Quantized, place: str) -> Tensor:
    """The values with block scales folded in; a tensorwise scale is left to the result."""
    values = dense_values(q, place)
    if q.block is None:
        return values
    (rows, columns), (block_rows, block_columns) = q.data.shape, q.block
    if rows % block_rows or columns % block_columns:
        return values.mul_(q.expanded(q.gemm_scale))
    values.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows)).mul_(
        q.gemm_scale[:, None, :, None]
    )
    return values
