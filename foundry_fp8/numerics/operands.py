"""An operand of a GEMM, quantised as its recipe says: the reference for every backend, frozen weights, probes and export."""

from __future__ import annotations

from torch import Tensor

from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.numerics.recipes import Operand, Recipe

__all__ = ["quantize"]


def quantize(
    x: Tensor, operand: Operand, recipe: Recipe, *, along: int = 1, scale: Tensor | None = None
) -> Quantized:
    """Quantise one operand.

    Args:
        x: ``[R, C]``, hp.
        operand: Which of the three tensors it is.
        recipe: The recipe.
        along: The dimension that the GEMM contracts: 1 for blocks along rows, 0 for blocks along columns. One scale a tensor and
            squares are the same either way.
        scale: 0-d float32, for a recipe whose scales come from earlier passes.
    """
    return recipe.scaling(operand, along).quantize(x, recipe.format(operand), scale)
