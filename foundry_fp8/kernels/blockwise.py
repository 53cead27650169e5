"""One scale per block: 1 x 128 and 128 x 1, 128 x 128, and MX's 1 x 32 and 32 x 1 with E8M0 scales, in one pass.

One read of the tensor gives both layouts: ``data`` with blocks along its rows for the GEMM that contracts over columns,
and ``data_t``, transposed, with blocks along what were its columns for the GEMM that contracts over rows. The two are
quantised independently from the hp values, so they are not transposes of each other, except for square blocks.

Scales are stored with the long axis contiguous (``[blocks, rows]``), which is how the GEMM reads them: one scale of every
row of its tile at each step along K. Those of squares are stored along K. Both are as cuBLASLt's own block-scaled GEMM has them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.interleaved import (
    ROWS_PER_WORD,
    largest_of,
    load_interleaved,
    store_interleaved,
    store_transposed,
)
from foundry_fp8.kernels.launch import (
    AS_WRITTEN,
    GEMM_MULTIPLE,
    BoundedCache,
    Launch,
    check_tiles,
    round_up,
    tiles,
)
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.kernels.scales import (
    amax_along,
    e8m0_reciprocal,
    e8m0_round_up,
    is_inf,
    power_2_scale,
    reciprocal,
    scale_from_amax,
)
from foundry_fp8.kernels.tensorwise import pad_to_multiple
from foundry_fp8.numerics.formats import Float8Format
from foundry_fp8.numerics.formats import e8m0_round_up as e8m0_round_up_reference
from foundry_fp8.numerics.mx_layout import swizzle_mx_scales
from foundry_fp8.numerics.quantize import quantize_block, quantize_mx

__all__ = ["BlockCast", "Blockwise", "quantize_blockwise", "quantize_blockwise_reference"]

TILE, WARPS = 128, 8
MX_TILE = (64, 128, 4)
"""Rows, columns and warps where 32 elements share a scale. 128 rows: up to 1.1 instructions an element fewer, twice the registers."""

_casts = BoundedCache()


class Blockwise(NamedTuple):
    """A tensor quantised with one scale a block, in the layouts that the GEMMs read."""

    data: Tensor | None
    """FP8 ``[R', C']``: R and C rounded up to 16 (32 for MX), zeros outside; ``None`` if not asked for."""
    gemm_scale: Tensor | None
    """Of ``data``, contiguous ``[ceil(C / group), R']`` float32 (``[ceil(R / 128), ceil(C / 128)]`` for square blocks), or E8M0 bytes as
    uint8, swizzled (:func:`swizzle_mx_scales`). NaN (255) where the block held an Inf."""
    data_t: Tensor | None
    """FP8 ``[C', R']``; ``None`` if not asked for."""
    gemm_scale_t: Tensor | None
    """Of ``data_t``, contiguous ``[ceil(R / group), C']`` (``[ceil(C / 128), ceil(R / 128)]``)."""
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

    Raises:
        ValueError: Another group, or a single column, which the optimiser of Triton 3.6's ptxas gets wrong on sm_90 (padding that
            is not zero; right with ``DISABLE_PTXAS_OPT=1``). No linear has one.
    """
    if group not in (32, 128) or (square and group != 128):
        raise ValueError(f"group={group}, square={square}: blocks are 1 x 128, 128 x 128 or 1 x 32.")
    key = *source.is_like, fmt.name, group, square, power_2, rows, columns, column_sum
    known = _casts.get(key)
    if known is None:
        options = {"rows": rows, "columns": columns, "column_sum": column_sum}
        known = _casts[key] = BlockCast(source, fmt, group=group, square=square, power_2=power_2, **options)
    if known.copies:
        source = source.checked()
    return Blockwise(*known(source.pointers))


class BlockCast:
    """:func:`quantize_blockwise` of all sources of one kind (:attr:`Producer.is_like`), with the same options.

    Attributes:
        copies: Sources of this kind have to be copied (:meth:`Producer.checked`).
    """

    __slots__ = ("_by_columns", "_by_rows", "_device", "_dtypes", "_launch", "_sizes", "_sums", "copies")

    def __init__(
        self,
        source: Producer,
        fmt: Float8Format,
        *,
        group: int,
        square: bool,
        power_2: bool,
        rows: bool,
        columns: bool,
        column_sum: bool,
    ) -> None:
        checked = source.checked()
        r, c = checked.x.shape
        multiple = _multiple(group)
        padded_r, padded_c = round_up(r, multiple), round_up(c, multiple)
        tile_r, tile_c, warps = MX_TILE if group == 32 else (TILE, TILE, WARPS)
        check_tiles(padded_r, max(padded_c, *checked.strides), tile_r, tile_c)
        if c == 1:
            raise ValueError(
                "block scales need two columns or more: ptxas compiles the kernel wrongly for one."
            )
        # MX tiles cover the scales' padding too.
        covered = TILE if group == 32 else 1
        tiles_r = tiles(round_up(padded_r, covered), tile_r)
        tiles_c = tiles(round_up(padded_c, covered), tile_c)
        self._launch = Launch(
            _quantize_blockwise_kernel,
            tiles_r * tiles_c,
            KIND=source.kind,
            GROUP=group,
            SQUARE=square,
            FMT_MAX=fmt.max,
            POWER_2=power_2,
            VALUE_FOR_INF=torch.finfo(source.x.dtype).max,
            TILE_R=tile_r,
            TILE_C=tile_c,
            num_warps=warps,
            **AS_WRITTEN,
        )
        self.copies = checked is not source
        self._device = source.x.device
        scales, dtype = scales_of(padded_r, padded_c, group, square)
        scales_t, _ = scales_of(padded_c, padded_r, group, square)
        self._dtypes = fmt.dtype, dtype
        self._by_rows = ((padded_r, padded_c), scales) if rows else None
        self._by_columns = ((padded_c, padded_r), scales_t) if columns else None
        self._sums = (tiles_r, c) if column_sum else None
        self._sizes = r, c, padded_r, padded_c

    def __call__(
        self, pointers: tuple[object, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Quantise a source of this kind.

        Args:
            pointers: Of the source, checked.

        Returns:
            The fields of :class:`Blockwise`.
        """
        empty, device, (dtype, scales_dtype) = torch.empty, self._device, self._dtypes
        data = scale = data_t = scale_t = partial = None
        if self._by_rows is not None:
            shape, scales = self._by_rows
            data = empty(shape, dtype=dtype, device=device)
            scale = empty(scales, dtype=scales_dtype, device=device)
        if self._by_columns is not None:
            shape, scales = self._by_columns
            if data is None or scale is None:
                data_t = empty(shape, dtype=dtype, device=device)
                scale_t = empty(scales, dtype=scales_dtype, device=device)
            else:  # cheaper for the host
                data_t, scale_t = data.new_empty(shape), scale.new_empty(scales)
        if self._sums is not None:
            partial = empty(self._sums, dtype=torch.float32, device=device)
        self._launch(*pointers, data, scale, data_t, scale_t, partial, *self._sizes)
        return data, scale, data_t, scale_t, None if partial is None else partial.sum(0)


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
        if group == 32:
            return data, swizzle_mx_scales(e8m0_round_up_reference(q.gemm_scale))
        # Blocks that hold padding only: amax 0, hence scale 1.
        shape, dtype = scales_of(data.shape[0], data.shape[1], group, square)
        scales = torch.ones(shape, dtype=dtype, device=x.device)
        found = q.gemm_scale if square else q.gemm_scale.t()
        scales[: found.shape[0], : found.shape[1]] = found
        return data, scales

    data, scale = one(x) if rows else (None, None)
    data_t, scale_t = one(x.t().contiguous()) if columns else (None, None)
    return Blockwise(data, scale, data_t, scale_t, x.float().sum(0) if column_sum else None)


def scales_of(rows: int, columns: int, group: int, square: bool) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the scales of ``rows`` times ``columns`` padded elements, blocks along the columns."""
    if group == 32:
        return (tiles(rows, 128) * tiles(columns, 128) * 512,), torch.uint8
    blocks = tiles(columns, group)
    return ((tiles(rows, TILE), blocks) if square else (blocks, rows)), torch.float32


def _multiple(group: int) -> int:
    """What rows and columns are padded to: whole MX groups, or whatever the GEMM asks."""
    return group if group == 32 else GEMM_MULTIPLE


@triton.jit
def _scales(
    amax, GROUP: tl.constexpr, FMT_MAX: tl.constexpr, POWER_2: tl.constexpr, VALUE_FOR_INF: tl.constexpr
):
    """(scale, what the GEMM gets) of a tile of block amaxes."""
    if GROUP == 32:
        code = e8m0_round_up(amax * (1.0 / FMT_MAX))
        return e8m0_reciprocal(code), tl.where(is_inf(amax), 255, code).to(tl.uint8)
    elif POWER_2:
        scale, scale_inv = power_2_scale(amax, FMT_MAX, VALUE_FOR_INF)
        return scale, tl.where(is_inf(amax), float("nan"), scale_inv)
    else:
        scale = scale_from_amax(amax, FMT_MAX, POWER_2, VALUE_FOR_INF)
        return scale, tl.where(is_inf(amax), float("nan"), reciprocal(scale))


@triton.jit
def _store_scales(scale_ptr, gemm_scale, rows, groups, padded_rows, padded_columns, GROUP: tl.constexpr):
    """Scales of ``rows`` and blocks ``groups``: ``[groups, rows]``, or those of MX as :func:`swizzle_mx_scales` puts them."""
    if GROUP == 32:
        # Tiles cover the padding of 128 rows and 4 blocks, whose code is 0: nothing needs a mask.
        of_tile = (rows // 128) * tl.cdiv(padded_columns, 128) + groups // 4
        tl.store(
            scale_ptr + of_tile * 512 + (rows % 32) * 16 + (rows % 128) // 32 * 4 + groups % 4, gemm_scale
        )
    else:
        inside = (rows < padded_rows) & (groups < tl.cdiv(padded_columns, GROUP))
        tl.store(scale_ptr + groups * padded_rows + rows, gemm_scale, mask=inside)


@triton.jit
def _store_rows(
    data_ptr, scale_ptr, a, b, c, d, first_row, first_column, padded_R, padded_C,
    GROUP: tl.constexpr, FMT_MAX: tl.constexpr, POWER_2: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Four parts with a scale for every block of their rows."""
    a, scale_a = _scaled_rows(a, GROUP, FMT_MAX, POWER_2, VALUE_FOR_INF)
    b, scale_b = _scaled_rows(b, GROUP, FMT_MAX, POWER_2, VALUE_FOR_INF)
    c, scale_c = _scaled_rows(c, GROUP, FMT_MAX, POWER_2, VALUE_FOR_INF)
    d, scale_d = _scaled_rows(d, GROUP, FMT_MAX, POWER_2, VALUE_FOR_INF)
    scale = tl.join(tl.join(scale_a, scale_c), tl.join(scale_b, scale_d))  # by row / 4, block, row % 4
    scale = tl.permute(
        tl.reshape(scale, (TILE_R // ROWS_PER_WORD, TILE_C // GROUP, ROWS_PER_WORD)), (0, 2, 1)
    )
    rows = first_row + tl.arange(0, TILE_R)[:, None]
    groups = first_column // GROUP + tl.arange(0, TILE_C // GROUP)[None, :]
    scale = tl.reshape(scale, (TILE_R, TILE_C // GROUP))
    _store_scales(scale_ptr, scale, rows, groups, padded_R, padded_C, GROUP)
    store_interleaved(data_ptr, a, b, c, d, first_row, first_column, padded_R, padded_C, TILE_R, TILE_C)


@triton.jit
def _scaled_rows(
    x, GROUP: tl.constexpr, FMT_MAX: tl.constexpr, POWER_2: tl.constexpr, VALUE_FOR_INF: tl.constexpr
):
    """A part times the scales of its rows' blocks, and what the GEMM gets of these, ``[rows, blocks]``."""
    blocks = tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))
    amax = amax_along(blocks, 2)
    scale, gemm_scale = _scales(amax, GROUP, FMT_MAX, POWER_2, VALUE_FOR_INF)
    return tl.reshape(blocks * scale[:, :, None], x.shape), gemm_scale


@triton.jit
def _quantize_blockwise_kernel(
    x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr,
    data_ptr, scale_ptr, data_t_ptr, scale_t_ptr, partial_ptr, R, C, padded_R, padded_C,
    KIND: tl.constexpr, GROUP: tl.constexpr, SQUARE: tl.constexpr, FMT_MAX: tl.constexpr, POWER_2: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    GROUPS_R: tl.constexpr = TILE_R // GROUP
    RUN: tl.constexpr = 8 if data_ptr is None else 16
    tiles_c = tl.cdiv(padded_C, TILE_C)
    tile_r = tl.program_id(0) // tiles_c
    tile_c = tl.program_id(0) % tiles_c
    first_row = tile_r * TILE_R
    first_column = tile_c * TILE_C
    a, b, c, d = load_interleaved(
        (x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr),
        first_row, first_column, R, C, KIND, TILE_R, TILE_C,
    )  # fmt: skip
    columns = first_column + tl.arange(0, TILE_C)
    if partial_ptr is not None:
        tl.store(partial_ptr + tile_r * C + columns, tl.sum((a + b) + (c + d), axis=0), mask=columns < C)

    # Values are within the format by their scales; an Inf is not, and the stores' conversion saturates.
    if SQUARE:
        amax = amax_along(tl.max(largest_of(a, b, c, d), axis=1), 0)
        scale, gemm_scale = _scales(amax, GROUP, FMT_MAX, POWER_2, VALUE_FOR_INF)
        a, b, c, d = a * scale, b * scale, c * scale, d * scale
        if data_ptr is not None:
            store_interleaved(
                data_ptr, a, b, c, d, first_row, first_column, padded_R, padded_C, TILE_R, TILE_C
            )
            tl.store(scale_ptr + tile_r * tiles_c + tile_c, gemm_scale)
        if data_t_ptr is not None:
            store_transposed(
                data_t_ptr, a, b, c, d, first_row, first_column, padded_R, padded_C, TILE_R, TILE_C, RUN
            )
            tl.store(scale_t_ptr + tile_c * tl.cdiv(padded_R, TILE_R) + tile_r, gemm_scale)
    else:
        if data_ptr is not None:
            _store_rows(
                data_ptr, scale_ptr, a, b, c, d, first_row, first_column, padded_R, padded_C,
                GROUP, FMT_MAX, POWER_2, VALUE_FOR_INF, TILE_R, TILE_C,
            )  # fmt: skip
        if data_t_ptr is not None:
            blocks = tl.reshape(largest_of(a, b, c, d), (GROUPS_R, GROUP // ROWS_PER_WORD, TILE_C))
            amax = amax_along(blocks, 1)  # [GROUPS_R, TILE_C]
            scale, gemm_scale = _scales(amax, GROUP, FMT_MAX, POWER_2, VALUE_FOR_INF)
            groups = tile_r * GROUPS_R + tl.arange(0, GROUPS_R)
            _store_scales(
                scale_t_ptr, gemm_scale, columns[None, :], groups[:, None], padded_C, padded_R, GROUP
            )
            scale = tl.broadcast_to(scale[:, None, :], (GROUPS_R, GROUP // ROWS_PER_WORD, TILE_C))
            scale = tl.reshape(scale, (TILE_R // ROWS_PER_WORD, TILE_C))
            store_transposed(
                data_t_ptr, a * scale, b * scale, c * scale, d * scale,
                first_row, first_column, padded_R, padded_C, TILE_R, TILE_C, RUN,
            )  # fmt: skip
