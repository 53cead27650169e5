"""A tile in four parts of interleaved rows: the form in which a quantise kernel transposes by whole words.

Part ``i`` holds rows ``4 n + i``, so that a thread has four rows of a column that follow each other: what becomes one 32-bit word of the
transpose. Stored from a plain tile, each byte would cross shared memory alone, and eight of them meet in a bank.
"""

import triton
import triton.language as tl

from foundry_fp8.kernels.producers import load_tile

__all__ = ["ROWS_PER_WORD", "largest_of", "load_interleaved", "store_interleaved", "store_transposed"]

ROWS_PER_WORD = tl.constexpr(4)
"""Bytes of a word. Rows are padded to a multiple of 16, so that no word is cut."""


@triton.jit
def load_interleaved(
    source, first_row, first_column, R, C, KIND: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr
):
    """:func:`load_tile`'s tile as four of ``[TILE_R / 4, TILE_C]``; ``source``: what :attr:`.Producer.pointers` has."""
    ROWS: tl.constexpr = TILE_R // ROWS_PER_WORD
    a = load_tile(*source, first_row, first_column, R, C, KIND, ROWS, TILE_C, ROWS_PER_WORD)
    b = load_tile(*source, first_row + 1, first_column, R, C, KIND, ROWS, TILE_C, ROWS_PER_WORD)
    c = load_tile(*source, first_row + 2, first_column, R, C, KIND, ROWS, TILE_C, ROWS_PER_WORD)
    d = load_tile(*source, first_row + 3, first_column, R, C, KIND, ROWS, TILE_C, ROWS_PER_WORD)
    return a, b, c, d


@triton.jit
def largest_of(a, b, c, d):
    """Element by element, the largest magnitude of four parts; NaN is left out."""
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def store_interleaved(
    data_ptr, a, b, c, d, first_row, first_column, padded_R, padded_C,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Four parts by rows into ``[padded_R, padded_C]``; the conversion saturates."""
    local_rows = tl.arange(0, TILE_R // ROWS_PER_WORD) * ROWS_PER_WORD
    local_columns = tl.arange(0, TILE_C)
    # One 64-bit base, 32-bit offsets inside the tile.
    tile_ptr = data_ptr + tl.cast(first_row, tl.int64) * padded_C + first_column
    offsets = local_rows[:, None] * padded_C + local_columns[None, :]
    inside = (first_row + local_rows < padded_R)[:, None] & (first_column + local_columns < padded_C)[None, :]
    dtype = data_ptr.dtype.element_ty
    tl.store(tile_ptr + offsets, a.to(dtype), mask=inside)
    tl.store(tile_ptr + padded_C + offsets, b.to(dtype), mask=inside)
    tl.store(tile_ptr + 2 * padded_C + offsets, c.to(dtype), mask=inside)
    tl.store(tile_ptr + 3 * padded_C + offsets, d.to(dtype), mask=inside)


@triton.jit
def store_transposed(
    data_t_ptr, a, b, c, d, first_row, first_column, padded_R, padded_C,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """The transpose of four parts into ``[padded_C, padded_R]``; the conversion saturates.

    ``RUN``: neighbouring columns that a thread holds, 16 where it also stores rows of FP8 in words of 16 bytes, 8 where it only loads
    such words. Columns are taken in steps of it, so that the words of threads side by side go to banks side by side.
    """
    dtype = data_t_ptr.dtype.element_ty
    # The last two axes name the row in a word, its high bit first: four registers that one conversion packs.
    words = tl.join(tl.join(a, c), tl.join(b, d)).to(dtype)
    words = tl.reshape(words, (TILE_R // ROWS_PER_WORD, TILE_C // RUN, RUN, ROWS_PER_WORD))
    tile = tl.reshape(tl.permute(words, (2, 1, 0, 3)), (TILE_C, TILE_R))
    local_rows = tl.arange(0, TILE_R)
    order = tl.arange(0, TILE_C)
    local_columns = order % (TILE_C // RUN) * RUN + order // (TILE_C // RUN)
    tile_ptr = data_t_ptr + tl.cast(first_column, tl.int64) * padded_R + first_row
    offsets = local_columns[:, None] * padded_R + local_rows[None, :]
    inside = (first_column + local_columns < padded_C)[:, None] & (first_row + local_rows < padded_R)[None, :]
    tl.store(tile_ptr + offsets, tile, mask=inside)
