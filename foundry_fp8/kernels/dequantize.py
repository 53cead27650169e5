"""Out of FP8: what cuDNN's attention writes, up to three tensors of one scale in one launch, and their amaxes into delayed scaling's state."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.launch import launch, tiles
from foundry_fp8.kernels.scales import is_inf, magnitude, reciprocal

__all__ = ["dequantize"]

ELEMENTS = 4096
"""Of a program: each thread reads 16 bytes."""
WARPS = 8


def dequantize(
    parts: Sequence[Tensor],
    scale: Tensor,
    amaxes: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    slot: Tensor | None = None,
    other: tuple[Tensor, Tensor | None] | None = None,
    scale_inv: Tensor | None = None,
) -> list[Tensor]:
    """``part / scale`` for each part, NaN where its amax is Inf: ``(part.float() * scale.reciprocal()).to(dtype)``, to the bit.

    Args:
        parts: One to three, FP8 of one format, contiguous.
        scale: One float32 element: what all were multiplied by.
        amaxes: One float32 element a part.
        dtype: Of the result.
        slot: One float32 element, raised in place to the largest of ``amaxes``; NaN counts as 0.
        other: Another amax, and the slot that is raised to it.
        scale_inv: One float32 element; becomes what the first part was multiplied by.

    Returns:
        Tensors shaped like ``parts``.
    """
    out = [torch.empty(part.shape, dtype=dtype, device=part.device) for part in parts]
    absent: list[None] = [None] * (3 - len(parts))
    sizes = [part.numel() for part in parts]
    launch(
        _dequantize_kernel,
        sum(tiles(size, ELEMENTS) for size in sizes),
        *parts, *absent, *out, *absent, *amaxes, *absent, scale, slot, *(other or (None, None)), scale_inv,
        *sizes, *([0] * len(absent)),
        ELEMENTS=ELEMENTS, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_kernel(
    a_ptr, b_ptr, c_ptr, out_a_ptr, out_b_ptr, out_c_ptr, amax_a_ptr, amax_b_ptr, amax_c_ptr, scale_ptr,
    slot_ptr, other_ptr, other_slot_ptr, scale_inv_ptr,
    size_a, size_b, size_c,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    of_a, of_b = tl.cdiv(size_a, ELEMENTS), tl.cdiv(size_b, ELEMENTS)
    inverse = reciprocal(tl.load(scale_ptr))
    if pid == 0:
        if slot_ptr is not None:
            tl.atomic_max(slot_ptr, magnitude(tl.load(amax_a_ptr)), sem="relaxed")
            if b_ptr is not None:
                tl.atomic_max(slot_ptr, magnitude(tl.load(amax_b_ptr)), sem="relaxed")
            if c_ptr is not None:
                tl.atomic_max(slot_ptr, magnitude(tl.load(amax_c_ptr)), sem="relaxed")
        if other_slot_ptr is not None:
            tl.atomic_max(other_slot_ptr, magnitude(tl.load(other_ptr)), sem="relaxed")
        if scale_inv_ptr is not None:
            tl.store(scale_inv_ptr, visible(inverse, amax_a_ptr))
    if pid < of_a:
        leave(a_ptr, out_a_ptr, visible(inverse, amax_a_ptr), pid, size_a, ELEMENTS)
    elif b_ptr is not None:
        if pid < of_a + of_b:
            leave(b_ptr, out_b_ptr, visible(inverse, amax_b_ptr), pid - of_a, size_b, ELEMENTS)
        elif c_ptr is not None:
            leave(c_ptr, out_c_ptr, visible(inverse, amax_c_ptr), pid - of_a - of_b, size_c, ELEMENTS)


@triton.jit
def visible(inverse, amax_ptr):
    """``inverse``, NaN where the amax is Inf, which a saturating conversion has hidden."""
    return tl.where(is_inf(tl.load(amax_ptr)), float("nan"), inverse)


@triton.jit
def leave(in_ptr, out_ptr, inverse, block, size, ELEMENTS: tl.constexpr):
    """One block of one part."""
    places = block.to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    values = tl.load(in_ptr + places, mask=places < size).to(tl.float32)
    tl.store(out_ptr + places, (values * inverse).to(out_ptr.dtype.element_ty), mask=places < size)
