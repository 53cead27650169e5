"""Operands for the emulated GEMMs: :mod:`foundry_fp8.numerics.operands` on any device, and the same bytes faster on a CPU.

What is slow on a CPU is not the arithmetic but the passes: ``x.abs().amax()`` allocates a copy, a clamp that cannot act
still reads everything, a fresh 32 MB buffer faults in page by page. So the fast path works in slabs through one scratch
buffer, takes the amax first, and clamps only where the amax says that something would saturate. It is bit-identical to
the reference for finite input and hands everything else to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.backends.emulated.dense import readable, scratch
from foundry_fp8.numerics.formats import E8M0_BIAS, Float8Format, e8m0_decode, e8m0_round_up
from foundry_fp8.numerics.quantize import Quantized, scale_from_amax
from foundry_fp8.numerics.recipes import Operand, Recipe
from foundry_fp8.numerics.scalings import Blocks, Constant, MXBlocks, OneScale, Scaling

__all__ = ["quantize_operand"]

_SLAB = 1 << 21
"""Elements that one pass of the fast path works on: 8 MiB of float32 scratch."""


def quantize_operand(
    x: Tensor, operand: Operand, recipe: Recipe, *, along: int, scale: Tensor | None = None, number: int = 0
) -> Quantized:
    """:func:`foundry_fp8.numerics.operands.quantize`, faster where there is a way."""
    fmt, scaling = recipe.format(operand), recipe.scaling(operand, along).of_pass(number)
    fast = _FAST.get(type(scaling))
    return scaling.quantize(x, fmt, scale) if fast is None else fast(x, scaling, fmt, scale)


def _quantize_tensor(x: Tensor, scaling: OneScale, fmt: Float8Format, scale: Tensor | None) -> Quantized:
    if readable(x):
        low, high = torch.aminmax(x)
        amax = torch.maximum(-low, high).float()
        if math.isfinite(amax):
            scale = scaling.scale(amax, fmt, scale)
            data = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
            saturates = bool(amax * scale > fmt.max)
            for piece, out in zip(_slabs(x, 1), _slabs(data, 1), strict=True):
                scaled = torch.mul(_widen(piece), scale, out=scratch("slab", piece.shape))
                out.copy_(scaled.clamp_(-fmt.max, fmt.max) if saturates else scaled)
            return Quantized(data, scale.reciprocal(), None, fmt, amax, nan_free=True)
    return scaling.quantize(x, fmt, scale)


def _quantize_constant(x: Tensor, scaling: Constant, fmt: Float8Format, _: Tensor | None) -> Quantized:
    if not readable(x):
        return scaling.quantize(x, fmt)
    data = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    finite = True
    for piece, out in zip(_slabs(x, 1), _slabs(data, 1), strict=True):
        scaled = torch.mul(_widen(piece), scaling.value, out=scratch("slab", piece.shape))
        low, high = torch.aminmax(scaled) if scaled.numel() else (scaled.new_zeros(()),) * 2
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = False
            break
        out.copy_(scaled.clamp_(-fmt.max, fmt.max))
    if not finite:
        return scaling.quantize(x, fmt)
    one = torch.full((), 1 / scaling.value, dtype=torch.float32, device=x.device)
    return Quantized(data, one, None, fmt, torch.zeros_like(one), nan_free=True)


def _quantize_blocks(x: Tensor, scaling: Blocks | MXBlocks, fmt: Float8Format, _: Tensor | None) -> Quantized:
    block, amax = scaling.block, _finite_block_amax(x, scaling.block)
    if amax is None:
        return scaling.quantize(x, fmt)
    if isinstance(scaling, MXBlocks):
        code = e8m0_round_up(amax * torch.tensor(1.0 / fmt.max, dtype=torch.float32, device=x.device))
        scale = e8m0_decode((2 * E8M0_BIAS - code.to(torch.int16)).to(torch.uint8))
        inverse = e8m0_decode(code)
    else:
        scale = scale_from_amax(amax, fmt, power_2=scaling.power_2, value_for_inf=torch.finfo(x.dtype).max)
        inverse = scale.reciprocal()
    data = _scale_and_cast(x, scale, block, fmt)
    return Quantized(data, inverse, block, fmt, amax, nan_free=True)


_FAST: dict[type[Scaling], Callable[[Tensor, Any, Float8Format, Tensor | None], Quantized]] = {
    OneScale: _quantize_tensor,
    Constant: _quantize_constant,
    Blocks: _quantize_blocks,
    MXBlocks: _quantize_blocks,
}


def _finite_block_amax(x: Tensor, block: tuple[int, int]) -> Tensor | None:
    """The amax of each block on a CPU; ``None`` where the fast path does not apply (elsewhere, ragged, not finite)."""
    rows, columns = x.shape
    if not readable(x) or rows % block[0] or columns % block[1]:
        return None
    amax = torch.empty(rows // block[0], columns // block[1], dtype=torch.float32, device=x.device)
    for piece, out in zip(_slabs(x, block[0]), _slabs(amax, 1, like=x, rows=block[0]), strict=True):
        magnitude = torch.abs(_widen(piece), out=scratch("slab", piece.shape))
        if block[1] > 1:
            magnitude = magnitude.view(len(piece), columns // block[1], block[1]).amax(dim=2)
        if block[0] > 1:
            magnitude = magnitude.view(len(piece) // block[0], block[0], -1).amax(dim=1)
        out.copy_(magnitude)
    return amax if math.isfinite(amax.amax()) else None  # amax keeps NaN here, unlike the reference's


def _scale_and_cast(x: Tensor, scale: Tensor, block: tuple[int, int], fmt: Float8Format) -> Tensor:
    """``cast(x * scale)`` for scales that keep every element within the format, so that nothing needs clamping."""
    data = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    scale_slabs = _slabs(scale, 1, like=x, rows=block[0])
    for piece, out, s in zip(_slabs(x, block[0]), _slabs(data, block[0]), scale_slabs, strict=True):
        scaled = scratch("slab", piece.shape)
        tiles = (len(piece) // block[0], block[0], piece.shape[1] // block[1], block[1])
        torch.mul(_widen(piece).view(tiles), s[:, None, :, None], out=scaled.view(tiles))
        out.copy_(scaled)
    return data


def _slabs(x: Tensor, multiple: int, *, like: Tensor | None = None, rows: int = 1) -> tuple[Tensor, ...]:
    """Split by rows into pieces of about ``_SLAB`` elements, a multiple of ``multiple`` rows each.

    With ``like``, split ``x`` (one row for ``rows`` rows of ``like``) where ``like`` would be split.
    """
    whole = x if like is None else like
    multiple = multiple if like is None else rows
    height = max(1, _SLAB // max(1, whole.shape[1]) // multiple) * multiple
    slabs: tuple[Tensor, ...] = x.split(height if like is None else height // rows)
    return slabs


def _widen(x: Tensor) -> Tensor:
    """``x`` as contiguous float32; through the scratch buffer where it has to be converted."""
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    return scratch("slab", x.shape).copy_(x)
