"""Triton kernels for packed activations: quantise and dequantise blocks, and the backward of a gated activation.

Twins of :mod:`foundry_fp8.activations.compression.packing` (same arguments, same bytes) and of the backward in
:mod:`foundry_fp8.activations.compression.fused_activation`. One program handles ``ROWS`` blocks; everything is computed in float32, and offsets in 64 bits, as they pass 2**31. Differences
from the reference: none in int8 and int4; in e4m3 none on a GPU, while Triton's interpreter rounds ties of the FP8 cast
away from zero instead of to even.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.launch import AS_WRITTEN, CONTRACTED
from foundry_fp8.numerics.packed import Packed, PackFormat

__all__ = [
    "block_scales", "byte_codes", "dequantize_blocks", "gated_backward", "load_codes", "operands", "quantize_blocks",
]  # fmt: skip

ROWS = 8
"""Blocks a program; 8 x 128 elements keep four warps busy with 128-bit loads."""


def quantize_blocks(flat: Tensor, fmt: PackFormat, *, nonzero: bool = False) -> tuple[Tensor, Tensor]:
    """``(codes, scale_inv)`` of :class:`~foundry_fp8.activations.compression.packing.Packed`.

    Args:
        flat: ``[numel]``, contiguous, float32, bfloat16 or float16.
        fmt: The format.
        nonzero: As in :func:`~foundry_fp8.activations.compression.packing.pack`.
    """
    n_blocks = triton.cdiv(flat.numel(), fmt.block)
    codes = torch.empty((n_blocks, fmt.code_bytes), dtype=torch.uint8, device=flat.device)
    scale_inv = torch.empty(n_blocks, dtype=fmt.scale_dtype, device=flat.device).view(torch.uint8)
    packed = Packed(codes, scale_inv, fmt, flat.numel(), flat.dtype)
    if n_blocks:
        constants = {"FORMAT": fmt.name, "NONZERO": nonzero, "BLOCK": fmt.block, "ROWS": ROWS}
        given = flat, *operands(packed), flat.numel(), n_blocks
        _quantize[(triton.cdiv(n_blocks, ROWS),)](*given, **constants, **AS_WRITTEN)
    return codes, scale_inv


def operands(packed: Packed) -> tuple[Tensor, Tensor]:
    """Codes and scales as the kernels take them: in the dtypes that the bytes are of."""
    codes = packed.codes.view(torch.float8_e4m3fn) if packed.fmt.name == "e4m3" else packed.codes
    return codes, packed.scale_inv.view(packed.fmt.scale_dtype)


def dequantize_blocks(packed: Packed) -> Tensor:
    """The values, ``[numel]``, in ``packed.dtype``."""
    fmt = packed.fmt
    out = torch.empty(packed.numel, dtype=packed.dtype, device=packed.codes.device)
    n_blocks = packed.codes.shape[0]
    if n_blocks:
        constants = {"FORMAT": fmt.name, "BLOCK": fmt.block, "ROWS": ROWS}
        given = *operands(packed), out, packed.numel, n_blocks
        _dequantize[(triton.cdiv(n_blocks, ROWS),)](*given, **constants, **CONTRACTED)
    return out


def gated_backward(dh: Tensor, gate: Packed, up: Packed, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of ``h = act(gate) * up``: ``(dgate, dup, h)``, reading the packed inputs once.

    Args:
        dh: ``[numel]``, contiguous, the dtype of the packed tensors.
        gate: Packed, int8 or e4m3.
        up: Packed the same way.
        kind: ``silu`` or ``gelu``.
    """
    dgate, dup, h = (torch.empty_like(dh) for _ in range(3))
    n_blocks = gate.codes.shape[0]

    if n_blocks:
        constants = {"FORMAT": gate.fmt.name, "KIND": kind, "BLOCK": gate.fmt.block, "ROWS": ROWS}
        given = dh, *operands(gate), *operands(up), dgate, dup, h, dh.numel(), n_blocks
        _gated_backward[(triton.cdiv(n_blocks, ROWS),)](*given, **constants, **CONTRACTED)
    return dgate, dup, h


@triton.jit
def _round_to_even(x):
    # Adding 1.5 * 2**23 leaves no bits for a fraction: float32 addition rounds to nearest even. |x| <= 2**22.
    return (x + 12582912.0) - 12582912.0


@triton.jit
def block_scales(x, FORMAT: tl.constexpr, SCALE: tl.constexpr):
    """``(x, scale, scale_inv)`` of float32 blocks ``[N, BLOCK]``.

    ``scale_inv`` has the dtype ``SCALE``; it is NaN for a block that is not finite, and ``x`` comes back as zeros there.
    """
    magnitude = tl.abs(x)
    # A comparison with NaN is false, so that this finds Inf and NaN alike, whatever max does with NaN.
    bad = tl.max(tl.where(magnitude <= 3.4028234663852886e38, 0, 1), axis=1)
    x = tl.where(bad[:, None] == 0, x, 0.0)
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30)
    CODE_MAX: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0 if FORMAT == "e4m3" else 7.0
    scale_inv = (amax * (1.0 / CODE_MAX)).to(SCALE)
    if FORMAT == "int4":
        scale = tl.div_rn(1.0, scale_inv.to(tl.float32))
    else:
        scale = tl.div_rn(CODE_MAX, amax)
    scale_inv = tl.where(bad == 0, scale_inv.to(tl.float32), float("nan")).to(SCALE)
    return x, scale, scale_inv


@triton.jit
def byte_codes(x, scale, FORMAT: tl.constexpr):
    """The codes of blocks ``[N, BLOCK]`` from :func:`block_scales`: E4M3, or int8 as uint8."""
    scaled = x * scale[:, None]
    if FORMAT == "e4m3":
        return tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv)
    else:
        return (_round_to_even(scaled).to(tl.int32) & 255).to(tl.uint8)


@triton.jit
def load_codes(codes_ptr, offset, mask, FORMAT: tl.constexpr):
    """E4M3 or int8 codes in float32, 0 where ``mask`` is false."""
    if FORMAT == "int8":
        return tl.load(codes_ptr + offset, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        return tl.load(codes_ptr + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _quantize(
    x_ptr,
    codes_ptr,
    scale_ptr,
    numel,
    n_blocks,
    FORMAT: tl.constexpr,
    NONZERO: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offset = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offset < numel
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    x, scale, scale_inv = block_scales(x, FORMAT, scale_ptr.dtype.element_ty)
    tl.store(scale_ptr + row, scale_inv, mask=row < n_blocks)
    if NONZERO and FORMAT != "e4m3":
        # At least 1 / scale, which becomes the smallest code.
        x = tl.where(x > 0.0, tl.maximum(x, tl.div_rn(1.0, scale)[:, None]), x)
    if FORMAT == "int4":
        rounded = tl.minimum(tl.maximum(_round_to_even(x * scale[:, None]), -7.0), 7.0) + 8.0
        pairs = tl.reshape(rounded.to(tl.int32), (ROWS, BLOCK // 2, 2))
        low, high = tl.split(pairs)
        half = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(codes_ptr + half, (low | (high << 4)).to(tl.uint8), mask=row[:, None] < n_blocks)
    else:
        tl.store(codes_ptr + offset, byte_codes(x, scale, FORMAT), mask=row[:, None] < n_blocks)


@triton.jit
def _load_values(
    codes_ptr, scale_ptr, row, n_blocks, FORMAT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    valid = row[:, None] < n_blocks
    if FORMAT == "int4":
        # bfloat16, widened by its bits: of a product that is stored in float16 Triton 3.9's LLVM otherwise takes the bfloat16 factor
        # to float16 first, which has not its range.
        bits = tl.load(scale_ptr.to(tl.pointer_type(tl.uint16)) + row, mask=row < n_blocks, other=0)
        scale_inv = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        half = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        byte = tl.load(codes_ptr + half, mask=valid, other=0).to(tl.int32)
        codes = tl.reshape(tl.join(byte & 15, byte >> 4), (ROWS, BLOCK)).to(tl.float32) - 8.0
    else:
        scale_inv = tl.load(scale_ptr + row, mask=row < n_blocks, other=0.0)
        offset = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        codes = load_codes(codes_ptr, offset, valid, FORMAT)
    return codes * scale_inv[:, None]


@triton.jit
def _dequantize(
    codes_ptr,
    scale_ptr,
    out_ptr,
    numel,
    n_blocks,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    values = _load_values(codes_ptr, scale_ptr, row, n_blocks, FORMAT, BLOCK, ROWS)
    offset = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + offset, values.to(out_ptr.dtype.element_ty), mask=offset < numel)


@triton.jit
def _gated_backward(
    dh_ptr, gate_ptr, gate_scale_ptr, up_ptr, up_scale_ptr, dgate_ptr, dup_ptr, h_ptr, numel, n_blocks,
    FORMAT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offset = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offset < numel
    dh = tl.load(dh_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    # Rounded as the reference's unpacked tensors are, so that both differentiate at the same point.
    gate = _load_values(gate_ptr, gate_scale_ptr, row, n_blocks, FORMAT, BLOCK, ROWS)
    up = _load_values(up_ptr, up_scale_ptr, row, n_blocks, FORMAT, BLOCK, ROWS)
    gate = gate.to(dh_ptr.dtype.element_ty).to(tl.float32)
    up = up.to(dh_ptr.dtype.element_ty).to(tl.float32)
    if KIND == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        activated = gate * sigmoid
        derivative = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    else:
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        activated = gate * cdf
        derivative = cdf + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    kind: tl.constexpr = dh_ptr.dtype.element_ty
    tl.store(dgate_ptr + offset, (dh * up * derivative).to(kind), mask=inside)
    tl.store(dup_ptr + offset, (dh * activated).to(kind), mask=inside)
    tl.store(h_ptr + offset, (activated * up).to(kind), mask=inside)
