"""Which layers gain nothing from FP8: a roofline of the GEMMs saved against the bytes that quantising moves.

For M tokens, the three GEMMs of an ``N x K`` linear save ``6 M N K (1 / bf16 - 1 / fp8)`` seconds, and quantising x and dy
costs ``bytes M (N + K) / bandwidth``. M cancels: FP8 is faster where ``N K / (N + K)`` is above a break-even. (Left out:
quantising the weight, which costs ``1 / M`` of that, and kernel launches, which cost nothing on large inputs.)

The rates are what H100 GEMMs and copies are known to reach, not vendor peaks and not measured by this package; their ratios
are similar on H200. With them the break-even is 528 for current scaling: square layers from 1056 on gain, and so do
Llama-3 8B's 4096 x 1024 key and value projections (819).

The block GEMM is this package's Triton kernel. It is predicted to be slower than BF16's GEMM, so no layer gains by it: from its compiled
code (a serial loop, one or two thread blocks a multiprocessor), and from what a similar kernel is known to reach on an H100 (torchao's,
1 x 128 by 128 x 128, at most 399 TFLOPS).
"""

from __future__ import annotations

import math

from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, Recipe

__all__ = ["break_even", "size_reason"]

BF16_FLOPS = 600e12  # FLOP/s that GEMMs reach on an H100
FP8_FLOPS = 1100e12
BLOCK_FP8_FLOPS = 525e12
"""Of the block-scaled kernel: the middle of 400 to 650 TFLOPS, estimated from its compiled code; not measured."""
BANDWIDTH = 2.5e12
"""Of GPU memory, bytes per second."""


def break_even(recipe: Recipe) -> float:
    """The ``N K / (N + K)`` above which ``recipe`` is predicted to be faster than BF16; infinite if it never is."""
    fp8 = BLOCK_FP8_FLOPS if isinstance(recipe, BlockScaling) else FP8_FLOPS
    if fp8 <= BF16_FLOPS:
        return math.inf
    # Per element: bf16 is read (twice under current scaling, whose amax takes a pass), and two FP8 layouts are written.
    single_pass = not isinstance(recipe, CurrentScaling)
    moved_bytes = 2 + 2 if single_pass else 4 + 2
    return moved_bytes / BANDWIDTH / (6 * (1 / BF16_FLOPS - 1 / fp8))


def size_reason(recipe: Recipe, in_features: int, out_features: int) -> str | None:
    """Why FP8 is predicted to make a layer no faster, or ``None`` if it makes it faster."""
    size = in_features * out_features / (in_features + out_features)
    least = break_even(recipe)
    if size >= least:
        return None
    if least == math.inf:
        return (
            f"the {recipe.name} recipe's GEMMs are predicted to be slower than BF16's on this backend. Name the recipe instead of "
            "auto to convert it anyway"
        )
    return (
        f"too small to gain: {in_features} x {out_features} has in * out / (in + out) = {size:.0f}, and the "
        f"{recipe.name} recipe breaks even at about {least:.0f}. Name the recipe instead of auto to convert it anyway"
    )
