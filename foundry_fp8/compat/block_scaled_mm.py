"""torch's own GEMM of operands with float32 scales of 1 x 128 and 128 x 128 elements.

Cause: ``torch.nn.functional.scaled_mm``, with which it can be asked for, came with torch 2.10, and it passes them to cuBLASLt, which
has them from CUDA 12.9 on for Hopper. Where it is missing the Triton GEMM runs (:mod:`foundry_fp8.kernels.block_gemm`), which has to stay
for linears that do not fit it; remove the question when every supported torch has it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

__all__ = ["block_mode_missing", "block_scaled_mm", "fits_block_mode"]

CUDA = (12, 9)
HOPPER = (9, 0)


def _missing() -> str | None:
    if not (hasattr(torch.nn.functional, "scaled_mm") and hasattr(torch.nn.functional, "ScalingType")):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm (2.10 has)"
    if tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2]) < CUDA:
        return f"torch is built for CUDA {torch.version.cuda}, whose cuBLASLt has no scales of blocks of 128 (12.9 has)"
    return None


_MISSING = _missing()


def block_mode_missing(index: int | None = None) -> str | None:
    """Why torch's own block-scaled GEMM does not run on CUDA device ``index`` (on Hopper where ``None``), or ``None`` if it does."""
    return _MISSING or (None if index is None else _missing_on(index))


@functools.cache
def _missing_on(index: int) -> str | None:
    if not torch.cuda.is_available():  # fake tensors
        return "there is no GPU"
    found = torch.cuda.get_device_capability(index)
    if found == HOPPER:
        return None
    return f"cuBLASLt scales blocks of 128 on compute capability 9.0, this GPU has {found[0]}.{found[1]}"


def fits_block_mode(rows: int, k: int, out_dtype: torch.dtype, *, square_b: bool) -> bool:
    """Whether a second operand ``[rows, k]`` has the scales that torch wants: whole blocks, and for squares whole words of four."""
    return out_dtype == torch.bfloat16 and (k % 512 == rows % 128 == 0 if square_b else k % 128 == 0)


def block_scaled_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype, *, square_b: bool
) -> Tensor:
    """``a @ b.T``, contiguous, with every 128 products along K promoted to float32.

    Args:
        a: FP8 ``[M, K]``.
        a_scale: float32 ``[K / 128, M]``, contiguous.
        b: FP8 ``[N, K]``.
        b_scale: The same for ``b``; for ``square_b`` ``[N / 128, K / 128]``.
        out_dtype: dtype of the result.
        square_b: ``b`` has one scale for 128 x 128.

    Source:
        Layouts: ``torch._meta_registrations``, torch 2.11; "1D and 2D block scaling", cuBLAS documentation.
    """
    functional: Any = torch.nn.functional  # mypy sees the pinned torch's
    kinds = functional.ScalingType
    of_b = kinds.BlockWise128x128 if square_b else kinds.BlockWise1x128
    found: Tensor = functional.scaled_mm(
        a, b.t(), a_scale.t(), kinds.BlockWise1x128, b_scale.t(), of_b, output_dtype=out_dtype
    )
    return found
