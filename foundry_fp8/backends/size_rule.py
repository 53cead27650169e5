"""Which layers gain nothing from FP8: a roofline of the GEMMs saved against the bytes that quantising moves.

For M tokens, the three GEMMs of an ``N x K`` linear save ``6 M N K (1 / bf16 - 1 / fp8)`` seconds, and quantising x and dy
costs ``bytes M (N + K) / bandwidth``. M cancels: FP8 is faster where ``N K / (N + K)`` is above a break-even. (Left out:
quantising the weight, which costs ``1 / M`` of that, and the host's time, which hides behind large inputs only.)

The rates were measured on an H100 (80 GB HBM3) on the shapes of Llama-3 8B with 8192 tokens: ``benchmarks/gemm_gpu.py`` and
``benchmarks/quantize_gpu.py``, 2026-11-26, torch 2.11. With them the break-even is 676 for current scaling: square layers from 1352 on
gain, and so do Llama-3 8B's 4096 x 1024 key and value projections (819).
"""

from __future__ import annotations

import math

from foundry_fp8.compat.block_scaled_mm import block_mode_missing
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["break_even", "saved_seconds", "size_reason"]

BF16_FLOPS = 770e12  # FLOP/s
FP8_FLOPS = 1370e12
BLOCK_FLOPS = 1130e12
"""Of torch's block-scaled GEMM, the mean of fprop, dgrad (1230) and wgrad (1000)."""
TRITON_BLOCK_FLOPS = 570e12
"""Of this package's own, which runs where torch has none."""
BANDWIDTH = 2.6e12
"""Bytes per second that the quantise kernels move."""


def _saved_per_flop(recipe: Recipe) -> float:
    fp8 = FP8_FLOPS
    if recipe.kind == "block":
        fp8 = BLOCK_FLOPS if block_mode_missing() is None else TRITON_BLOCK_FLOPS
    return 1 / BF16_FLOPS - 1 / fp8


def _seconds_per_element(recipe: Recipe) -> float:
    # bf16 is read (twice under current scaling, whose amax takes a pass), and two FP8 layouts are written.
    return (6 if recipe.measures_first or recipe.by_row else 4) / BANDWIDTH


def saved_seconds(recipe: Recipe, tokens: int, in_features: int, out_features: int) -> float:
    """What ``recipe`` is predicted to save of a linear's forward and backward; negative if it costs time."""
    products = 6 * tokens * in_features * out_features * _saved_per_flop(recipe)
    return products - tokens * (in_features + out_features) * _seconds_per_element(recipe)


def break_even(recipe: Recipe) -> float:
    """The ``N K / (N + K)`` above which ``recipe`` is predicted to be faster than BF16; infinite if it never is."""
    saved = _saved_per_flop(recipe)
    return math.inf if saved <= 0 else _seconds_per_element(recipe) / (6 * saved)


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
