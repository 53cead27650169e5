"""RMSNorm and LayerNorm around the fused quantise, or the packing of their input: row statistics before it, the gradient after it.

The statistics are a pass of their own because an FP8 tile needs them before its first element, and the transposed layout
needs tiles. For a bf16 input of n elements, norm and quantise together then move 4n bytes read and 2n written, against
8n and 4n for an unfused norm followed by current scaling.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.launch import (
    AS_WRITTEN,
    BoundedCache,
    Launch,
    aligned,
    alignments,
    as_rows,
    check_hp,
    tiles,
)
from foundry_fp8.kernels.packing import block_scales, byte_codes, load_codes, operands, quantize_blocks
from foundry_fp8.numerics.packed import Packed, PackFormat

__all__ = ["MAX_COLUMNS", "norm_backward", "norm_statistics", "pack_norm_input"]

MAX_COLUMNS = 65536
"""A row is held in registers."""
SUM_ROWS, SUM_COLUMNS = 16, 32
"""What a program that sums up parts reads at a time."""

_statistics, _backwards = BoundedCache(), BoundedCache()


def norm_statistics(x: Tensor, eps: float, *, centered: bool) -> tuple[Tensor | None, Tensor]:
    """Mean (``None`` unless ``centered``) and reciprocal root of the mean square, of each row.

    Args:
        x: ``[R, C]``, hp.
        eps: Added to the mean square (the variance, if centered).
        centered: LayerNorm; otherwise RMSNorm.

    Returns:
        Two float32 ``[R]``.

    Raises:
        ValueError: More than 65536 columns.
    """
    check_hp("x", x)
    x = as_rows(x)
    rows, columns = x.shape
    _check_columns(columns)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device) if centered else None
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if x.numel():
        key = rows, columns, x.stride(0), x.dtype, x.device, aligned(x), centered
        run = _statistics.get(key)
        if run is None:
            block, warps = _row_block(columns)
            run = _statistics[key] = Launch(_statistics_kernel, rows, BLOCK=block, num_warps=warps)
        run(x, x.stride(0), mean, rstd, columns, eps)
    return mean, rstd


def pack_norm_input(
    x: Tensor, fmt: PackFormat, eps: float, *, centered: bool
) -> tuple[Packed, Tensor | None, Tensor]:
    """``x`` packed, and what :func:`norm_statistics` returns for it, in one pass over each row.

    With :func:`norm_backward`, which reads the codes themselves, it moves 3n and 5n bytes for a bfloat16 input of n elements, against
    5n and 9n with the packing, statistics and unpacking apart.

    Args:
        x: ``[R, C]``, hp.
        fmt: int8 or e4m3. Where its block does not divide C, blocks cross rows, and packing is a pass of its own.
        eps: Added to the mean square (the variance, if centered).
        centered: LayerNorm; otherwise RMSNorm.

    Returns:
        The bytes of :func:`~foundry_fp8.activations.compression.packing.pack`, the mean (or ``None``) and the reciprocal root.

    Raises:
        ValueError: More than 65536 columns.
    """
    check_hp("x", x)
    x = x.contiguous()
    rows, columns = x.shape
    _check_columns(columns)
    if columns % fmt.block:
        mean, rstd = norm_statistics(x, eps, centered=centered)
        return Packed(*quantize_blocks(x.view(-1), fmt), fmt, x.numel(), x.dtype), mean, rstd
    n_blocks = x.numel() // fmt.block
    codes = torch.empty((n_blocks, fmt.block), dtype=torch.uint8, device=x.device)
    scale_inv = torch.empty(n_blocks, dtype=fmt.scale_dtype, device=x.device).view(torch.uint8)
    packed = Packed(codes, scale_inv, fmt, x.numel(), x.dtype)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device) if centered else None
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if x.numel():
        width, warps = _row_block(columns)
        constants = {"FORMAT": fmt.name, "BLOCK": fmt.block, "BLOCKS": max(width // fmt.block, 1)}
        given = x, *operands(packed), mean, rstd, columns, eps
        _pack_norm_input[(rows,)](*given, **constants, num_warps=warps, **AS_WRITTEN)
    return packed, mean, rstd


def norm_backward(
    dy: Tensor,
    x: Tensor | Packed,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    mean: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a norm.

    Args:
        dy: ``[R, C]``, hp: gradient of the norm's output.
        x: ``[R, C]``, hp: its input; or that packed, in int8 or e4m3.
        rstd: ``[R]`` float32.
        weight: ``[C]``, hp, or ``None``.
        mean: ``[R]`` float32 for LayerNorm.
        dtype: Of the gradients of weight and bias.

    Returns:
        ``dx`` in the dtype of ``x``, and ``[C]`` gradients of weight and bias, summed in float32 in a fixed order. An RMSNorm (no
        ``mean``) has no bias: that gradient is empty.

    Raises:
        ValueError: More than 65536 columns.
    """
    check_hp("dy", dy)
    dy = as_rows(dy)
    rows, columns = dy.shape
    _check_columns(columns)
    dx = torch.empty((rows, columns), dtype=x.dtype, device=dy.device)
    values, scale = (as_rows(x), None) if isinstance(x, Tensor) else operands(x)
    stride = values.stride(0) if scale is None else columns
    given = [t for t in (dy, values, scale, mean, rstd, weight) if t is not None]
    what = (
        x.fmt if isinstance(x, Packed) else None,
        None if weight is None else weight.dtype,
        mean is None,
        dtype,
    )
    key = rows, columns, dy.stride(0), stride, dy.dtype, x.dtype, dy.device, *alignments(*given), *what
    known = _backwards.get(key)
    if known is None:
        known = _backwards[key] = _backward_launches(dy, x, 1 if mean is None else 2)
    programs, run, add_up = known
    partial = torch.empty(
        (1 if mean is None else 2, programs, columns), dtype=torch.float32, device=dy.device
    )
    if dy.numel():
        run(dy, dy.stride(0), values, stride, scale, mean, rstd, weight, dx, partial, rows, columns)
    else:
        partial.zero_()
    dweight = torch.empty(columns, dtype=dtype, device=dy.device)
    dbias = torch.empty(0 if mean is None else columns, dtype=dtype, device=dy.device)
    add_up(partial, dweight, dbias, columns)
    return dx, dweight, dbias


def _backward_launches(dy: Tensor, x: Tensor | Packed, sums: int) -> tuple[int, Launch, Launch]:
    """Programs that go over rows; their launch, and that which adds up what they found."""
    rows, columns = dy.shape
    most = 2 * torch.cuda.get_device_properties(dy.device).multi_processor_count if dy.is_cuda else 4
    programs = max(1, min(rows, most))
    packed = (
        {"FORMAT": x.fmt.name, "PACK_BLOCK": x.fmt.block}
        if isinstance(x, Packed)
        else {"FORMAT": "", "PACK_BLOCK": 0}
    )
    block, warps = _row_block(columns)
    # 16: with 32 warps a thread has too few registers for its part of a row of 16384, and spills (H100: half the speed).
    run = Launch(
        _backward_kernel, programs, **packed, PROGRAMS=programs, BLOCK=block, num_warps=min(warps, 16)
    )
    constants = {"PROGRAMS": programs, "ROWS": SUM_ROWS, "COLUMNS": SUM_COLUMNS, "num_warps": 4}
    return programs, run, Launch(_sum_kernel, sums * tiles(columns, SUM_COLUMNS), **constants)


def _check_columns(columns: int) -> None:
    """Raise :class:`ValueError` if a row of ``columns`` is wider than a kernel can hold."""
    if columns > MAX_COLUMNS:
        raise ValueError(f"a norm over {columns} features; the fused kernel takes at most {MAX_COLUMNS}.")


def _row_block(columns: int) -> tuple[int, int]:
    """How a kernel holds a row: elements (a power of two), and warps."""
    block = triton.next_power_of_2(max(columns, 16))
    return block, min(32, max(1, block // 512))


@triton.jit
def _statistics_kernel(x_ptr, x_stride, mean_ptr, rstd_ptr, C, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if mean_ptr is not None:
        mean = tl.sum(x, axis=0) / C
        tl.store(mean_ptr + row, mean)
        x = tl.where(inside, x - mean, 0.0)
    square = tl.sum(x * x, axis=0) / C
    tl.store(rstd_ptr + row, tl.div_rn(1.0, tl.sqrt_rn(square + eps)))


@triton.jit
def _pack_norm_input(
    x_ptr, codes_ptr, scale_ptr, mean_ptr, rstd_ptr, C, eps,
    FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < C
    x = tl.load(x_ptr + row * C + columns, mask=inside, other=0.0).to(tl.float32)
    deviation = x
    if mean_ptr is not None:
        mean = tl.sum(tl.sum(x, axis=1), axis=0) / C
        tl.store(mean_ptr + row, mean)
        deviation = tl.where(inside, x - mean, 0.0)
    square = tl.sum(tl.sum(deviation * deviation, axis=1), axis=0) / C
    tl.store(rstd_ptr + row, tl.div_rn(1.0, tl.sqrt_rn(square + eps)))
    x, scale, scale_inv = block_scales(x, FORMAT, scale_ptr.dtype.element_ty)
    tl.store(scale_ptr + row * (C // BLOCK) + blocks, scale_inv, mask=blocks < C // BLOCK)
    tl.store(codes_ptr + row * C + columns, byte_codes(x, scale, FORMAT), mask=inside)


@triton.jit
def _backward_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, scale_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, partial_ptr,
    R, C,
    FORMAT: tl.constexpr, PACK_BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    if mean_ptr is not None:
        dbias = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(pid, R, PROGRAMS):
        offset = tl.cast(row, tl.int64)
        if scale_ptr is not None:
            first = offset * C
            blocks = (tl.cast(first % PACK_BLOCK, tl.int32) + columns) // PACK_BLOCK
            scale_inv = tl.load(scale_ptr + first // PACK_BLOCK + blocks, mask=inside, other=0.0)
            x = load_codes(x_ptr + first, columns, inside, FORMAT) * scale_inv
            # Rounded as the reference's unpacked tensor is, so that both differentiate at the same point.
            x = x.to(dx_ptr.dtype.element_ty).to(tl.float32)
        else:
            x = tl.load(x_ptr + offset * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + row)
        normalized = tl.where(inside, x * rstd, 0.0)
        g = dy
        if weight_ptr is not None:  # of every row again, from the cache: held, it would take registers
            g = dy * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        dx = g - normalized * (tl.sum(g * normalized, axis=0) / C)
        if mean_ptr is not None:
            dx -= tl.sum(g, axis=0) / C
        tl.store(dx_ptr + offset * C + columns, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
        dweight += dy * normalized
        if mean_ptr is not None:
            dbias += dy
    tl.store(partial_ptr + pid * C + columns, dweight, mask=inside)
    if mean_ptr is not None:
        tl.store(partial_ptr + (PROGRAMS + pid) * C + columns, dbias, mask=inside)


@triton.jit
def _sum_kernel(
    partial_ptr, dweight_ptr, dbias_ptr, C, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The parts of all programs of :func:`_backward_kernel`, added up: of the weight's gradient, then of the bias'."""
    tiles = tl.cdiv(C, COLUMNS)
    of_bias = tl.program_id(0) // tiles
    columns = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, PROGRAMS, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < PROGRAMS)[:, None] & (columns < C)[None, :]
        offsets = (of_bias * PROGRAMS + rows)[:, None] * C + columns[None, :]
        total += tl.load(partial_ptr + offsets, mask=inside, other=0.0)
    out_ptr = dweight_ptr if of_bias == 0 else dbias_ptr
    tl.store(out_ptr + columns, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=columns < C)
