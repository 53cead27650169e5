"""Which layers gain nothing from FP8: a roofline of the GEMMs saved against the bytes that quantising moves.

For M tokens, the three GEMMs of an ``N x K`` linear save ``6 M N K (1 / bf16 - 1 / fp8)`` seconds, and quantising x and dy
costs ``bytes M (N + K) / bandwidth``. M cancels: FP8 is faster where ``N K / (N + K)`` is above a break-even. (Left out:
quantising the weight, which costs ``1 / M`` of that, and the host's time, which hides behind large inputs only.)

The rates were measured on an H100 (80 GB HBM3) on the shapes of Llama-3 8B with 8192 tokens: ``benchmarks/gemm_gpu.py`` and
``benchmarks/quantize_gpu.py``, 2026-11-26, torch 2.11. With them the break-even is 676 for current scaling: square layers from 1352 on
gain, and so do Llama-3 8B's 4096 x 1024 key and value projections (819). Other GPUs are assumed to reach the same shares of their data
sheets. The model of a whole step (:mod:`foundry_fp8.planning.speed`) has the same rates.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from foundry_fp8.compat.block_scaled_mm import block_mode_missing
from foundry_fp8.gpus import GPUS, Gpu, gpu_of
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["Rates", "break_even", "bytes_per_element", "rates_of", "saved_seconds", "size_reason"]


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a GPU reaches."""

    bf16: float = 770e12
    """FLOP/s of large GEMMs."""
    fp8: float = 1370e12
    block: float = 1130e12
    """Of torch's block-scaled GEMM, the mean of fprop, dgrad (1230) and wgrad (1000)."""
    triton_block: float = 570e12
    """Of this package's own, which runs where torch has none."""
    fp4: float | None = None
    attention: float = 475e12
    """Of BF16's two GEMMs, forward and backward: 16384 tokens, heads of 128, causal (``benchmarks/context_gpu.py``)."""
    bandwidth: float = 2.6e12
    """Bytes per second that kernels move which quantise."""

    def products(self, recipe: Recipe | None) -> float:
        """FLOP/s of the GEMMs of ``recipe``; ``None`` is BF16."""
        if recipe is None:
            return self.bf16
        if recipe.kind == "block":
            return self.block if block_mode_missing() is None else self.triton_block
        return self.fp4 if recipe.element_bits == 4 and self.fp4 else self.fp8


_H100 = Rates()


def rates_of(gpu: Gpu) -> Rates:
    """The rates of ``gpu``: measured, or at the H100's shares of the data sheet."""
    measured, peaks = GPUS["h100"], gpu.peaks.flops_per_sec
    bf16 = gpu.bf16_flops / measured.bf16_flops
    fp8 = peaks.get("fp8", 0.0) / measured.peaks.of("fp8")
    shares = Rates(
        bf16=bf16 * _H100.bf16,
        fp8=fp8 * _H100.fp8,
        block=fp8 * _H100.block,
        triton_block=fp8 * _H100.triton_block,
        fp4=peaks["fp4"] / measured.peaks.of("fp8") * _H100.fp8 if "fp4" in peaks else None,
        attention=bf16 * _H100.attention,
        bandwidth=gpu.bandwidth / measured.bandwidth * _H100.bandwidth,
    )
    names = {field.name for field in dataclasses.fields(Rates)}
    return dataclasses.replace(shares, **{k: v for k, v in gpu.reached.items() if k in names})


def _saved_per_flop(recipe: Recipe, rates: Rates) -> float:
    return 1 / rates.bf16 - 1 / rates.products(recipe)


def bytes_per_element(recipe: Recipe) -> int:
    """That quantising x or dy moves: bf16 is read (twice under current scaling, whose amax takes a pass), two FP8 layouts are written."""
    return 6 if recipe.measures_first or recipe.by_row else 4


def saved_seconds(recipe: Recipe, tokens: int, in_features: int, out_features: int) -> float:
    """What ``recipe`` is predicted to save of a linear's forward and backward on an H100; negative if it costs time."""
    products = 6 * tokens * in_features * out_features * _saved_per_flop(recipe, _H100)
    return products - tokens * (in_features + out_features) * bytes_per_element(recipe) / _H100.bandwidth


def break_even(recipe: Recipe, rates: Rates = _H100) -> float:
    """The ``N K / (N + K)`` above which ``recipe`` is predicted to be faster than BF16; infinite if it never is."""
    saved = _saved_per_flop(recipe, rates)
    return math.inf if saved <= 0 else bytes_per_element(recipe) / rates.bandwidth / (6 * saved)


def size_reason(
    recipe: Recipe, in_features: int, out_features: int, rates: Rates | None = None
) -> str | None:
    """Why FP8 is predicted to make a layer no faster on a GPU of ``rates``, by default this one; ``None`` if it makes it faster."""
    size = in_features * out_features / (in_features + out_features)
    if rates is None:  # an H100's where this process has no GPU, or one that is not known
        gpu = gpu_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        rates = _H100 if gpu is None else rates_of(gpu)
    least = break_even(recipe, rates)
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
