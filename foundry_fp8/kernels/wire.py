"""Triton twins of :mod:`foundry_fp8.distributed.wire`: encode, decode, and decode with the sum over ranks.

Each reads its input once and writes its output once. The layout of a message is the reference's: per row, the codes of
all blocks, then their float32 scales. Codes and scales are the reference's bit for bit, except where float32 rounding of
the rotation before int4 may differ by the order of its 32 products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.launch import AS_WRITTEN
from foundry_fp8.numerics.wire_format import WireFormat, hadamard_matrix

__all__ = ["decode_mean_rows", "decode_rows", "encode_rows"]

_KINDS = {"int8": 0, "e4m3": 1, "int4": 2}
_BLOCKS_A_PROGRAM = 16  # 16 runs of 32 is the least that tl.dot takes


def encode_rows(x: Tensor, wire: WireFormat, out: Tensor, seed: int | None = None) -> None:
    """Write codes and scales of the rows of ``x`` into ``out``; see :func:`foundry_fp8.distributed.wire.encode`."""
    rows, numel = x.shape
    blocks, payload = wire.blocks(numel), wire.payload_bytes(numel)
    grid = (triton.cdiv(blocks, _BLOCKS_A_PROGRAM), rows)
    scales = out[:, payload : payload + 4 * blocks].view(torch.float32)
    tensors = x, x.stride(0), out, out.stride(0), scales, scales.stride(0), hadamard_matrix(x.device)
    constants = {"AT_RANDOM": seed is not None, "LIMIT": wire.limit, **_constants(wire)}
    _encode[grid](*tensors, numel, blocks, seed or 0, **constants)


def decode_rows(message: Tensor, wire: WireFormat, numel: int, out: Tensor) -> Tensor:
    """Write the elements of the rows of ``message`` into ``out``; see :func:`foundry_fp8.distributed.wire.decode`."""
    _launch_decode(message, wire, numel, out, message.shape[0], 1, 1.0)
    return out


def decode_mean_rows(message: Tensor, wire: WireFormat, numel: int, divisor: float, out: Tensor) -> Tensor:
    """Write the rows' sum over ``divisor`` into ``out``; see :func:`foundry_fp8.distributed.wire.decode_mean`."""
    _launch_decode(message, wire, numel, out.view(1, -1), 1, message.shape[0], float(divisor))
    return out


def _launch_decode(
    message: Tensor, wire: WireFormat, numel: int, out: Tensor, rows: int, summed: int, divisor: float
) -> None:
    blocks, payload = wire.blocks(numel), wire.payload_bytes(numel)
    scales = message[:, payload : payload + 4 * blocks].view(torch.float32)
    tensors = message, message.stride(0), scales, scales.stride(0), out, out.stride(0)
    sizes = hadamard_matrix(message.device), numel, blocks, summed, divisor
    _decode[(triton.cdiv(blocks, _BLOCKS_A_PROGRAM), rows)](*tensors, *sizes, **_constants(wire))


def _constants(wire: WireFormat) -> dict[str, Any]:
    kind, block = _KINDS[wire.name], wire.block_size
    return {"KIND": kind, "BLOCK": block, "MANY": _BLOCKS_A_PROGRAM, **AS_WRITTEN}


@triton.jit
def _rotate(x, matrix, BLOCK: tl.constexpr, MANY: tl.constexpr):
    """``x``: [MANY, BLOCK]; multiplies each run of 32 elements with the Hadamard matrix."""
    at = tl.arange(0, 32)
    hadamard = tl.load(matrix + at[:, None] * 32 + at[None, :])
    runs = tl.reshape(x, (MANY * BLOCK // 32, 32))
    return tl.reshape(tl.dot(runs, hadamard, input_precision="ieee"), (MANY, BLOCK))


@triton.jit
def _to_e4m3(x, noise, AT_RANDOM: tl.constexpr):
    """The E4M3 byte of ``|x| <= 448``, to nearest even or by ``noise``. In integers, so that it runs before sm_89 as well."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Below 2**-6 codes are multiples of 2**-9.
    if AT_RANDOM:
        normal = ((magnitude + (noise * 1048576.0).to(tl.int32)) >> 20) - (120 << 3)
        subnormal = (tl.abs(x) * 512.0 + noise).to(tl.int32)
    else:
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # 12582912 is 1.5 * 2**23, whose last bit stands for 1.
        subnormal = ((tl.abs(x) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _from_e4m3(byte):
    """The float32 value of an E4M3 byte that is not NaN."""
    code = byte.to(tl.int32)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    return tl.where(code >= 128, -value, value)


@triton.jit
def _encode(
    x, x_stride, out, out_stride, scales, scales_stride, matrix, numel, blocks, seed,
    AT_RANDOM: tl.constexpr, LIMIT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * MANY + tl.arange(0, MANY)
    lane = tl.arange(0, BLOCK)
    element = block[:, None].to(tl.int64) * BLOCK + lane[None, :]
    value = tl.load(x + row * x_stride + element, mask=element < numel, other=0.0).to(tl.float32)
    if KIND == 2:
        value = _rotate(value, matrix, BLOCK, MANY)
    # max drops NaN on a GPU, so non-finite elements are counted: x - x is 0 for finite x only.
    bad = tl.sum((value - value != 0.0).to(tl.int32), axis=1) > 0
    amax = tl.maximum(tl.max(tl.where(value - value == 0.0, tl.abs(value), 0.0), axis=1), 1e-30)
    inside = block < blocks
    scale = tl.where(bad, float("nan"), tl.div_rn(amax, amax * 0.0 + LIMIT))
    tl.store(scales + row * scales_stride + block, scale, mask=inside)
    inverse = tl.div_rn(amax * 0.0 + LIMIT, amax)
    scaled = tl.where(bad[:, None], 0.0, value * inverse[:, None])
    base = out + row * out_stride
    noise = tl.rand(seed + row, (element & 0x7FFFFFFF).to(tl.int32)) if AT_RANDOM else 0.0
    if KIND == 1:
        clamped = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
        tl.store(base + element, _to_e4m3(clamped, noise, AT_RANDOM), mask=inside[:, None])
    else:
        if AT_RANDOM:
            whole = tl.minimum(tl.maximum(tl.floor(scaled + noise), -LIMIT), LIMIT).to(tl.int32)
        else:
            # Round half to even: adding and taking away 1.5 * 2**23 leaves an integer, with the hardware's rounding.
            whole = ((scaled + 12582912.0) - 12582912.0).to(tl.int32)
        if KIND == 0:
            tl.store(base + element, whole.to(tl.int8).to(tl.uint8, bitcast=True), mask=inside[:, None])
        else:
            pairs = tl.reshape(whole + 8, (MANY, 2, BLOCK // 2))
            low, high = tl.split(tl.permute(pairs, (0, 2, 1)))
            place = block[:, None].to(tl.int64) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            tl.store(base + place, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])


@triton.jit
def _decode(
    message, message_stride, scales, scales_stride, out, out_stride, matrix, numel, blocks, summed, divisor,
    KIND: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * MANY + tl.arange(0, MANY)
    inside = block < blocks
    lane = tl.arange(0, BLOCK)
    element = block[:, None].to(tl.int64) * BLOCK + lane[None, :]
    total = tl.zeros((MANY, BLOCK), tl.float32)
    for index in range(summed):
        row = first + index
        base = message + row * message_stride
        scale = tl.load(scales + row * scales_stride + block, mask=inside, other=0.0)
        if KIND == 2:
            half: tl.constexpr = BLOCK // 2
            place = block[:, None].to(tl.int64) * half + tl.arange(0, half)[None, :]
            byte = tl.load(base + place, mask=inside[:, None], other=0).to(tl.int32)
            joined = tl.permute(tl.join((byte & 15) - 8, (byte >> 4) - 8), (0, 2, 1))
            code = tl.reshape(joined, (MANY, BLOCK)).to(tl.float32)
        else:
            byte = tl.load(base + element, mask=inside[:, None], other=0)
            if KIND == 0:
                code = byte.to(tl.int8, bitcast=True).to(tl.float32)
            else:
                code = _from_e4m3(byte)
        part = code * scale[:, None]
        if KIND == 2:
            part = _rotate(part, matrix, BLOCK, MANY)
        total += part
    if divisor != 1.0:
        total = tl.div_rn(total, total * 0.0 + divisor)
    tl.store(out + first * out_stride + element, total.to(out.dtype.element_ty), mask=element < numel)
