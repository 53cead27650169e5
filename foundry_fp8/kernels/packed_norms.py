"""The forward of a norm that keeps a packed input: its statistics and the packing, in one pass over each row.

The backward is :func:`foundry_fp8.kernels.norms.norm_backward`, which reads the codes themselves. For a bfloat16 input of
n elements the two passes move 3n and 5n bytes, against 5n and 9n with the packing, statistics and unpacking apart.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.launch import AS_WRITTEN, check_hp
from foundry_fp8.kernels.norms import check_columns, norm_statistics, row_block
from foundry_fp8.kernels.packing import block_scales, byte_codes, operands, quantize_blocks
from foundry_fp8.numerics.packed import Packed, PackFormat

__all__ = ["pack_norm_input"]


def pack_norm_input(
    x: Tensor, fmt: PackFormat, eps: float, *, centered: bool
) -> tuple[Packed, Tensor | None, Tensor]:
    """``x`` packed, and what :func:`~foundry_fp8.kernels.norms.norm_statistics` returns for it.

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
    check_columns(columns)
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
        width, warps = row_block(columns)
        _pack_norm_input[(rows,)](
            x,
            *operands(packed),
            mean,
            rstd,
            columns,
            eps,
            FORMAT=fmt.name,
            BLOCK=fmt.block,
            BLOCKS=max(width // fmt.block, 1),
            num_warps=warps,
            **AS_WRITTEN,
        )
    return packed, mean, rstd


@triton.jit
def _pack_norm_input(
    x_ptr,
    codes_ptr,
    scale_ptr,
    mean_ptr,
    rstd_ptr,
    C,
    eps,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
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
