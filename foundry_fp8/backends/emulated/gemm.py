"""The emulated GEMM: exact products of FP8 values, added in float32 or as Hopper adds them, scaled in float32, rounded once.

bfloat16 represents every FP8 value exactly, also times a power of two. So matrix units for bfloat16 (or TF32) compute exact
products and add them in float32. Block scales that are not powers of two need float32 products.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import torch
from torch import Tensor

from foundry_fp8.backends.emulated.dense import dense_values, readable, scratch
from foundry_fp8.backends.emulated.hopper import hopper_mm
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
    by_row: bool = False,
) -> Tensor:
    """``alpha * a @ b.T + bias``.

    Args:
        a: ``[M, K]``.
        b: ``[N, K]``.
        out_dtype: What the result is rounded to, from float32.
        bias: ``[N]``, hp; added in float32.
        power_2: Whether block scales are powers of two (always for mxfp8).
        sums: How the products are added up.
        alpha: Output multiplier, applied with the scales; for operands with one scale per tensor only.
        by_row: Each row has one scale, which multiplies the result, first ``b``'s, as CUTLASS does behind ``torch._scaled_mm``.

    Returns:
        ``[M, N]`` in ``out_dtype``; NaN where a scale is NaN, because its tensor or block held an Inf.
    """
    a_scale, b_scale = a.gemm_scale, b.gemm_scale
    if by_row:
        a, b = (dataclasses.replace(q, block=None) for q in (a, b))
    # A selective checkpoint may keep what a matmul returned, so only scratch and later results are written in place.
    buffer = None
    if sums == "float32":
        temporary = out_dtype != torch.float32 and readable(a.data) and readable(b.data)
        buffer = scratch("product", (a.data.shape[0], b.data.shape[0])) if temporary else None
        product = _float32_mm(a, b, out=buffer, narrow=a.block is None or power_2)
    else:
        product = hopper_mm(a, b, fast=sums == "hopper_fast")
    if by_row:
        product = buffer = torch.mul(product, b_scale.t(), out=buffer)
        product = torch.mul(product, a_scale, out=buffer)
    elif a.block is None:
        product = buffer = torch.mul(product, a_scale * b_scale * alpha, out=buffer)
    if bias is not None:
        product = torch.add(product, bias, out=buffer)
    return product.to(out_dtype)


def _float32_mm(a: Quantized, b: Quantized, *, out: Tensor | None, narrow: bool) -> Tensor:
    """``a @ b.T`` in float32 with block scales applied.

    Args:
        a: ``[M, K]``.
        b: ``[N, K]``.
        out: Where to put it; ``None`` for new memory.
        narrow: Whether bfloat16 represents the scaled values exactly.
    """
    left, right = _scaled_values(a, "a"), _scaled_values(b, "b")
    device_type = left.device.type
    with float32_products(device_type, narrow=narrow and has_bf16_units(device_type)):
        return torch.mm(left, right.t(), out=out)


def _scaled_values(q: Quantized, place: str) -> Tensor:
    """The values times their block scales, float32; a tensorwise scale is applied to the result instead."""
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
