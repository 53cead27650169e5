"""One scale per block: 1 x 128 and 128 x 1, 128 x 128, and MX's 1 x 32 and 32 x 1 with E8M0 scales, in one pass.

One read of the tensor gives both layouts: ``data`` with blocks along its rows for the GEMM that contracts over columns,
and ``data_t``, transposed, with blocks along what were its columns for the GEMM that contracts over rows. The two are
quantised independently from the hp values, so they are not transposes of each other, except for square blocks.

Scales are stored with the long axis contiguous (``[blocks, rows]``), which is how the GEMM reads them: one scale of every
row of its tile at each step along K.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.launch import AS_WRITTEN, GEMM_MULTIPLE, launch, round_up, tiles
from foundry_fp8.kernels.producers import Producer, load_tile
from foundry_fp8.kernels.scales import (
    e8m0_decode,
    e8m0_round_up,
    is_inf,
    magnitude,
    power_2_scale,
    reciprocal,
    saturate,
    scale_from_amax,
)
from foundry_fp8.kernels.tensorwise import pad_to_multiple
from foundry_fp8.numerics.formats import Float8Format
from foundry_fp8.numerics.formats import e8m0_round_up as e8m0_round_up_reference
from foundry_fp8.numerics.quantize import Quantized, quantize_block, quantize_mx

__all__ = ["Blockwise", "quantize_blockwise", "quantize_blockwise_reference"]

TILE = 128


class Blockwise(NamedTuple):
    """A tensor quantised with one scale a block, in the layouts that the GEMMs read."""

    data: Tensor | None
    """FP8 ``[R', C']``: R and C rounded up to 16 (32 for MX), zeros outside; ``None`` if not asked for."""
    gemm_scale: Tensor | None
    """Of ``data``, contiguous ``[ceil(C / group), R']`` float32 (``[ceil(C / 128), ceil(R / 128)]`` for square blocks), or E8M0 bytes as
    uint8. NaN (255) where the block held an Inf."""
    data_t: Tensor | None
    """FP8 ``[C', R']``; ``None`` if not asked for."""
    gemm_scale_t: Tensor | None
    """Of ``data_t``, contiguous ``[ceil(R / group), C']`` (``[ceil(R / 128), ceil(C / 128)]``)."""
    column_sum: Tensor | None
    """float32 ``[C]``; ``None`` if not asked for."""


def quantize_blockwise(
    source: Producer,
    fmt: Float8Format,
    *,
    group: int = 128,
    square: bool = False,
    power_2: bool = True,
    rows: bool = True,
    columns: bool = True,
    column_sum: bool = False,
) -> Blockwise:
    """Quantise by blocks; :func:`quantize_blockwise_reference` is the definition.

    Args:
        source: What to quantise, ``[R, C]``.
        fmt: The number format.
        group: Elements that share a scale: 128 (float32 scales) or 32 (E8M0 scales).
        square: Blocks of 128 x 128 instead (``group`` 128 only).
        power_2: float32 scales are powers of two; E8M0 scales always are.
        rows: Write ``data``.
        columns: Write ``data_t``.
        column_sum: Sum the columns, in a fixed order.
    """
    if group not in (32, 128) or (square and group != 128):
        raise ValueError(f"group={group}, square={square}: blocks are 1 x 128, 128 x 128 or 1 x 32.")
    (r, c), device = source.x.shape, source.x.device
    multiple = _multiple(group)
    padded_r, padded_c = round_up(r, multiple), round_up(c, multiple)
    tiles_r, tiles_c = tiles(padded_r, TILE), tiles(padded_c, TILE)
    scale_dtype = torch.float32 if group == 128 else torch.uint8

    def outputs(wanted: bool, long: int, short: int) -> tuple[Tensor | None, Tensor | None]:
        """Empty data ``[long, short]`` and its scales, blocks along ``short``."""
        if not wanted:
            return None, None
        per_row = tiles(long, TILE) if square else long
        scales = torch.empty((tiles(short, group), per_row), dtype=scale_dtype, device=device)
        return torch.empty((long, short), dtype=fmt.dtype, device=device), scales

    # What a producer adds would leave room for one block a multiprocessor; it does not spill at 128.
    producing = source.kind != 0 and group == 128 and not square and rows and columns
    bounded = {"maxnreg": 128} if producing else {}
    data, scale = outputs(rows, padded_r, padded_c)
    data_t, scale_t = outputs(columns, padded_c, padded_r)
    partial = torch.empty((tiles_r, c), dtype=torch.float32, device=device) if column_sum else None
    if tiles_r * tiles_c:
        launch(
            _quantize_blockwise_kernel,
            tiles_r * tiles_c,
            *source.pointers,
            data,
            scale,
            data_t,
            scale_t,
            partial,
            r,
            c,
            padded_r,
            padded_c,
            known_by=(*source.launch_key, fmt.name, group, square, power_2, rows, columns, column_sum),
            KIND=source.kind,
            GROUP=group,
            SQUARE=square,
            FMT_MAX=fmt.max,
            INV_FMT_MAX=1.0 / fmt.max,
            POWER_2=power_2,
            VALUE_FOR_INF=torch.finfo(source.x.dtype).max,
            TILE=TILE,
            num_warps=8,
            **bounded,
            **AS_WRITTEN,
        )
    return Blockwise(data, scale, data_t, scale_t, None if partial is None else partial.sum(0))


def quantize_blockwise_reference(
    source: Producer,
    fmt: Float8Format,
    *,
    group: int = 128,
    square: bool = False,
    power_2: bool = True,
    rows: bool = True,
    columns: bool = True,
    column_sum: bool = False,
) -> Blockwise:
    """The torch expression that :func:`quantize_blockwise` computes, bit for bit (``column_sum`` up to its order)."""
    x = source.reference()

    def one(hp: Tensor) -> tuple[Tensor, Tensor]:
        block = (128, 128) if square else (1, group)
        q = quantize_block(hp, block, fmt, power_2=power_2) if group == 128 else quantize_mx(hp, block, fmt)
        data = pad_to_multiple(q.data, _multiple(group))
        gemm_scale = _e8m0_codes(q) if group == 32 else q.gemm_scale
        # Blocks that hold padding only: amax 0, hence scale 1 (code 0 in E8M0).
        scales = torch.full(
            (-(-data.shape[1] // group), -(-data.shape[0] // block[0])),
            0 if group == 32 else 1.0,
            dtype=gemm_scale.dtype,
            device=x.device,
        )
        scales[: gemm_scale.shape[1], : gemm_scale.shape[0]] = gemm_scale.t()
        return data, scales

    data, scale = one(x) if rows else (None, None)
    data_t, scale_t = one(x.t().contiguous()) if columns else (None, None)
    return Blockwise(data, scale, data_t, scale_t, x.float().sum(0) if column_sum else None)


def _multiple(group: int) -> int:
    """What rows and columns are padded to: whole MX groups, or whatever the GEMM asks."""
    return group if group == 32 else GEMM_MULTIPLE


def _e8m0_codes(q: Quantized) -> Tensor:
    """``gemm_scale`` of an MX tensor as E8M0 bytes: exact for its powers of two, 255 for NaN."""
    return e8m0_round_up_reference(q.gemm_scale)


@triton.jit
def _scales(
    amax,
    GROUP: tl.constexpr,
    FMT_MAX: tl.constexpr,
    INV_FMT_MAX: tl.constexpr,
    POWER_2: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
):
    """(scale, what the GEMM gets) of a tile of block amaxes."""
    if GROUP == 32:
        code = e8m0_round_up(amax * INV_FMT_MAX)
        return e8m0_decode(254 - code), tl.where(is_inf(amax), 255, code).to(tl.uint8)
    elif POWER_2:
        scale, scale_inv = power_2_scale(amax, FMT_MAX, VALUE_FOR_INF)
        return scale, tl.where(is_inf(amax), float("nan"), scale_inv)
    else:
        scale = scale_from_amax(amax, FMT_MAX, POWER_2, VALUE_FOR_INF)
        return scale, tl.where(is_inf(amax), float("nan"), reciprocal(scale))


@triton.jit
def _quantize_blockwise_kernel(
    x_ptr,
    x_stride,
    up_ptr,
    up_stride,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    alpha_ptr,
    data_ptr,
    scale_ptr,
    data_t_ptr,
    scale_t_ptr,
    partial_ptr,
    R,
    C,
    padded_R,
    padded_C,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SQUARE: tl.constexpr,
    FMT_MAX: tl.constexpr,
    INV_FMT_MAX: tl.constexpr,
    POWER_2: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    TILE: tl.constexpr,
):
    GROUPS: tl.constexpr = TILE // GROUP
    tiles_c = tl.cdiv(padded_C, TILE)
    tile_r = tl.program_id(0) // tiles_c
    tile_c = tl.program_id(0) % tiles_c
    first_row = tile_r * TILE
    first_column = tile_c * TILE
    x = load_tile(
        x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, alpha_ptr,
        first_row, first_column, R, C, KIND, TILE, TILE,
    )  # fmt: skip
    local = tl.arange(0, TILE)
    rows = first_row + local
    columns = first_column + local
    if partial_ptr is not None:
        tl.store(partial_ptr + tile_r * C + columns, tl.sum(x, axis=0), mask=columns < C)
    inside = (rows < padded_R)[:, None] & (columns < padded_C)[None, :]
    inside_t = (columns < padded_C)[:, None] & (rows < padded_R)[
        None, :
    ]  # tl.trans would hide it from the compiler
    # One 64-bit base, 32-bit offsets inside the tile.
    base = tl.cast(first_row, tl.int64) * padded_C + first_column
    base_t = tl.cast(first_column, tl.int64) * padded_R + first_row
    offsets = local[:, None] * padded_C + local[None, :]
    offsets_t = local[:, None] * padded_R + local[None, :]
    size = magnitude(x)

    if SQUARE:
        amax = tl.max(tl.max(size, axis=1), axis=0)
        scale, gemm_scale = _scales(amax, GROUP, FMT_MAX, INV_FMT_MAX, POWER_2, VALUE_FOR_INF)
        q = saturate(x * scale, FMT_MAX)
        if data_ptr is not None:
            tl.store(data_ptr + base + offsets, q.to(data_ptr.dtype.element_ty), mask=inside)
            tl.store(scale_ptr + tile_c * tl.cdiv(padded_R, TILE) + tile_r, gemm_scale)
        if data_t_ptr is not None:
            tl.store(
                data_t_ptr + base_t + offsets_t,
                tl.trans(q.to(data_t_ptr.dtype.element_ty)),
                mask=inside_t,
            )
            tl.store(scale_t_ptr + tile_r * tiles_c + tile_c, gemm_scale)
    else:
        if data_ptr is not None:
            amax = tl.max(tl.reshape(size, (TILE, GROUPS, GROUP)), axis=2)  # [TILE, GROUPS]
            scale, gemm_scale = _scales(amax, GROUP, FMT_MAX, INV_FMT_MAX, POWER_2, VALUE_FOR_INF)
            scaled = tl.reshape(tl.reshape(x, (TILE, GROUPS, GROUP)) * scale[:, :, None], (TILE, TILE))
            tl.store(
                data_ptr + base + offsets,
                saturate(scaled, FMT_MAX).to(data_ptr.dtype.element_ty),
                mask=inside,
            )
            blocks = tile_c * GROUPS + tl.arange(0, GROUPS)
            inside_scales = (rows < padded_R)[:, None] & (blocks < tl.cdiv(padded_C, GROUP))[None, :]
            tl.store(scale_ptr + blocks[None, :] * padded_R + rows[:, None], gemm_scale, mask=inside_scales)
        if data_t_ptr is not None:
            amax = tl.max(tl.reshape(size, (GROUPS, GROUP, TILE)), axis=1)  # [GROUPS, TILE]
            scale, gemm_scale = _scales(amax, GROUP, FMT_MAX, INV_FMT_MAX, POWER_2, VALUE_FOR_INF)
            scaled = tl.reshape(tl.reshape(x, (GROUPS, GROUP, TILE)) * scale[:, None, :], (TILE, TILE))
            quantized = saturate(scaled, FMT_MAX).to(data_t_ptr.dtype.element_ty)
            tl.store(data_t_ptr + base_t + offsets_t, tl.trans(quantized), mask=inside_t)
            blocks = tile_r * GROUPS + tl.arange(0, GROUPS)
            inside_scales = (blocks < tl.cdiv(padded_R, GROUP))[:, None] & (columns < padded_C)[None, :]
            tl.store(
                scale_t_ptr + blocks[:, None] * padded_C + columns[None, :], gemm_scale, mask=inside_scales
            )
