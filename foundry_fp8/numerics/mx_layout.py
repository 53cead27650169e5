"""Where the tensor cores of sm_100 want the scales of MX operands."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["swizzle_mx_scales", "unswizzle_mx_scales"]


def swizzle_mx_scales(codes: Tensor) -> Tensor:
    """E8M0 scales in the order in which the tensor cores of sm_100 read them.

    Tiles of 128 rows by 4 scales, padded with zero codes; inside a tile, scale ``(r, c)`` lies at
    ``(r % 32) * 16 + (r // 32) * 4 + c``.

    Args:
        codes: uint8 ``[R, K / 32]``, any strides.

    Returns:
        uint8, one-dimensional.

    Source:
        "1D block scaling factors layout", cuBLAS documentation.
    """
    rows, columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -columns % 4, 0, -rows % 128))
    in_tiles = padded.reshape(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    return in_tiles.permute(0, 3, 2, 1, 4).flatten()  # [tile_r, tile_c, r % 32, r // 32, c]


def unswizzle_mx_scales(scales: Tensor, rows: int, columns: int) -> Tensor:
    """The ``[rows, columns]`` codes of which :func:`swizzle_mx_scales` made ``scales``."""
    in_tiles = scales.view(-(-rows // 128), -(-columns // 4), 32, 4, 4)
    return in_tiles.permute(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -1)[:rows, :columns]
