"""torch's grouped GEMMs of FP8 operands.

Cause: the public ``torch.nn.functional.scaled_grouped_mm`` came with torch 2.10; ``torch._scaled_grouped_mm`` is in every supported torch
and does the same. It runs on compute capability 9.0, multiplies E4M3 by E4M3 (an H100 with torch 2.11 refuses E5M2), writes bfloat16, and takes a
scale for each row of either operand.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["runs_grouped_mm", "scaled_grouped_mm"]

HOPPER = (9, 0)


@functools.cache  # every product asks
def runs_grouped_mm(device: torch.device) -> bool:
    """Whether torch's grouped GEMM runs there."""
    return torch.cuda.get_device_capability(device) == HOPPER


def scaled_grouped_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, *, fast_accumulation: bool
) -> Tensor:
    """``a_e @ b_e`` of each group.

    Args:
        a: FP8 ``[R, C]``, contiguous.
        a_scale: float32: ``[R]``, or one for each row of each group's product where the groups divide C.
        b: FP8 ``[groups, C, N]``, or ``[C, N]`` where the groups divide C; C has stride 1.
        b_scale: float32 ``[groups, N]``, or ``[groups * N]``.
        ends: int32 ``[groups]``: where each group's rows, or columns, end. Columns are a multiple of 16.
        fast_accumulation: Let the tensor cores accumulate in their own, shorter format.

    Returns:
        bfloat16 ``[R, N]``, or ``[groups, R, N]``.
    """
    return torch._scaled_grouped_mm(
        a, b, a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast_accumulation
    )
