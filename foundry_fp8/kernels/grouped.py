"""One scale for each expert's rows: their amaxes, and the cast of all of them in one launch, by rows and transposed.

The GEMM that adds up over tokens (wgrad) wants each expert's rows to be a multiple of 16. So the transposed layout has columns of zeros
between experts, the layout by rows has none: a program reads rows of the padded order, and ``source`` says which row of ``x`` each is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.interleaved import ROWS_PER_WORD, store_transposed
from foundry_fp8.kernels.launch import AS_WRITTEN, as_rows, check_hp, check_tiles, launch, tiles
from foundry_fp8.kernels.scales import amax_along
from foundry_fp8.numerics.formats import Float8Format, cast
from foundry_fp8.numerics.quantize import amax_of

__all__ = ["group_amax", "group_amax_reference", "quantize_groups", "quantize_groups_reference"]

AMAX_R, AMAX_C = 8, 512
"""Rows and columns of the amax kernel's tile: a program walks along whole rows, so that it has one atomic a row."""
TILE_R, TILE_C, WARPS = 64, 128, 4
"""As in :mod:`foundry_fp8.kernels.tensorwise`."""


def group_amax(x: Tensor, group: Tensor, source: Tensor | None, experts: int) -> Tensor:
    """Max |x| of each expert's rows, NaN ignored.

    Args:
        x: ``[R, C]``, hp.
        group: ``[P]``, int32: the expert of each row in the padded order.
        source: ``[P]``, int32: which row of ``x`` each is, -1 for padding; ``None``: P is R, and every row is itself.
        experts: How many there are.

    Returns:
        float32 ``[experts]``; 0 where there is no row.
    """
    check_hp("x", x)
    x = as_rows(x)
    found = torch.zeros(experts, dtype=torch.float32, device=x.device)
    given = x, x.stride(0), group, source, found, len(group), x.shape[1]
    constants = {"TILE_R": AMAX_R, "TILE_C": AMAX_C, "num_warps": WARPS}
    launch(_group_amax_kernel, tiles(len(group), AMAX_R), *given, **constants, **AS_WRITTEN)
    return found


def group_amax_reference(x: Tensor, group: Tensor, source: Tensor | None, experts: int) -> Tensor:
    """The torch expression of :func:`group_amax`."""
    return torch.stack([amax_of(x[_rows_of(e, group, source)]) for e in range(experts)])


def quantize_groups(
    x: Tensor,
    scale: Tensor,
    group: Tensor,
    source: Tensor | None,
    fmt: Float8Format,
    *,
    rows: bool,
    columns: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Cast each row with its expert's scale.

    Args:
        x: ``[R, C]``, hp; C a multiple of 16.
        scale: float32 ``[experts]``.
        group: See :func:`group_amax`; P a multiple of 16.
        source: See :func:`group_amax`.
        fmt: The number format.
        rows: Make the layout by rows.
        columns: Make the transposed layout.

    Returns:
        FP8 ``[R, C]``, and ``[C, P]`` with zeros at padding; ``None`` for what was not asked for.

    Raises:
        ValueError: More rows or columns than a kernel reaches.
    """
    check_hp("x", x)
    x = as_rows(x)
    padded, width = len(group), x.shape[1]
    check_tiles(padded, max(width, x.stride(0)), TILE_R, TILE_C)
    data = torch.empty(x.shape, dtype=fmt.dtype, device=x.device) if rows else None
    data_t = torch.empty((width, padded), dtype=fmt.dtype, device=x.device) if columns else None
    given = x, x.stride(0), scale, group, source, data, data_t, padded, width
    constants = {"TILE_R": TILE_R, "TILE_C": TILE_C, "num_warps": WARPS}
    programs = tiles(padded, TILE_R) * tiles(width, TILE_C)
    launch(_group_cast_kernel, programs, *given, **constants, **AS_WRITTEN)
    return data, data_t


def quantize_groups_reference(
    x: Tensor,
    scale: Tensor,
    group: Tensor,
    source: Tensor | None,
    fmt: Float8Format,
    *,
    rows: bool,
    columns: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The torch expression of :func:`quantize_groups`."""
    given = torch.arange(len(group), device=x.device) if source is None else source
    real = given >= 0
    padded = torch.where(real[:, None], x.float()[given.clamp(min=0)], 0.0) * scale[group][:, None]
    return cast(padded[real], fmt) if rows else None, cast(padded.t(), fmt).contiguous() if columns else None


def _rows_of(expert: int, group: Tensor, source: Tensor | None) -> Tensor:
    mine = group == expert
    return mine.nonzero()[:, 0] if source is None else source[mine & (source >= 0)]


@triton.jit
def _source_of(source_ptr, rows, P):
    """Which rows of ``x`` (int64) ``rows`` of the padded order are, and whether they are any."""
    real = rows < P
    source = rows
    if source_ptr is not None:
        source = tl.load(source_ptr + rows, mask=real, other=-1)
        real = real & (source >= 0)
    return tl.cast(source, tl.int64), real


@triton.jit
def _group_amax_kernel(
    x_ptr, x_stride, group_ptr, source_ptr, amax_ptr, P, C, TILE_R: tl.constexpr, TILE_C: tl.constexpr
):
    rows = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    source, real = _source_of(source_ptr, rows, P)
    row_ptr = x_ptr + source * x_stride
    found = tl.zeros((TILE_R,), dtype=tl.float32)
    for first in range(0, C, TILE_C):
        columns = first + tl.arange(0, TILE_C)
        inside = real[:, None] & (columns < C)[None, :]
        x = tl.load(row_ptr[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        found = tl.maximum(found, amax_along(x, 1))
    group = tl.load(group_ptr + rows, mask=real, other=0)
    tl.atomic_max(amax_ptr + group, found, mask=real, sem="relaxed")


@triton.jit
def _group_cast_rows(
    x_ptr, x_stride, scale_ptr, group_ptr, source_ptr, data_ptr, rows, columns, P, C
):  # fmt: skip
    """The scaled float32 values of ``rows`` of the padded order; stored by rows where there is a ``data_ptr``."""
    source, real = _source_of(source_ptr, rows, P)
    inside = real[:, None] & (columns < C)[None, :]
    scale = tl.load(scale_ptr + tl.load(group_ptr + rows, mask=real, other=0), mask=real, other=1.0)
    x = tl.load(x_ptr + (source * x_stride)[:, None] + columns[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32) * scale[:, None]  # the stores' conversion saturates
    if data_ptr is not None:
        tl.store(
            data_ptr + (source * C)[:, None] + columns[None, :], x.to(data_ptr.dtype.element_ty), mask=inside
        )
    return x


@triton.jit
def _group_cast_kernel(
    x_ptr, x_stride, scale_ptr, group_ptr, source_ptr, data_ptr, data_t_ptr, P, C,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles_c = tl.cdiv(C, TILE_C)
    first_row = (pid // tiles_c) * TILE_R
    first_column = (pid % tiles_c) * TILE_C
    rows = first_row + tl.arange(0, TILE_R // ROWS_PER_WORD) * ROWS_PER_WORD
    columns = first_column + tl.arange(0, TILE_C)
    a = _group_cast_rows(x_ptr, x_stride, scale_ptr, group_ptr, source_ptr, data_ptr, rows, columns, P, C)
    b = _group_cast_rows(x_ptr, x_stride, scale_ptr, group_ptr, source_ptr, data_ptr, rows + 1, columns, P, C)
    c = _group_cast_rows(x_ptr, x_stride, scale_ptr, group_ptr, source_ptr, data_ptr, rows + 2, columns, P, C)
    d = _group_cast_rows(x_ptr, x_stride, scale_ptr, group_ptr, source_ptr, data_ptr, rows + 3, columns, P, C)
    if data_t_ptr is not None:
        RUN: tl.constexpr = 8 if data_ptr is None else 16
        store_transposed(data_t_ptr, a, b, c, d, first_row, first_column, P, C, TILE_R, TILE_C, RUN)
