"""A recipe as the plain values that the Triton kernels take, and the layout of a quantised operand. Needs no Triton."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import Tensor

from foundry_fp8.numerics.formats import E4M3, E5M2, Float8Format
from foundry_fp8.numerics.quantize import Quantized, with_amax
from foundry_fp8.numerics.recipes import Gemm, Operand, Recipe

__all__ = ["FORMATS", "Layout", "Plan", "plan_of", "quantized_view"]

FORMATS: dict[str, Float8Format] = {fmt.name: fmt for fmt in (E4M3, E5M2)}
"""The FP8 formats by name, as a :class:`Plan` stores them."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe for the kernels, in plain values that a compiled graph can hold."""

    kind: str
    """The scaling's: :attr:`Recipe.kind <foundry_fp8.numerics.recipes.Recipe.kind>`."""
    x_fmt: str  # of w too
    dy_fmt: str
    power_2: bool  # scales are powers of two
    fast: tuple[Gemm, ...] = ()
    """The GEMMs with fast accumulation (sums in the tensor cores' own accumulator)."""
    gradient_scale: int | Literal["auto"] = 1
    """The scale of dy; ``unit`` only."""
    alpha: float = 1.0
    """The layer's output multiplier: every GEMM's result is multiplied by it; ``unit`` only."""

    def fmt(self, operand: Operand) -> str:
        """The name of the operand's number format."""
        return self.dy_fmt if operand == "dy" else self.x_fmt


def plan_of(recipe: Recipe, alpha: float = 1.0) -> Plan:
    """The plan of ``recipe`` for a layer with the output multiplier ``alpha``."""
    power_2 = recipe.powers_of_two
    fast = getattr(recipe, "fast_accumulation", ())
    gradient_scale = getattr(recipe, "gradient_scale", 1)
    fmts = recipe.format("x").name, recipe.format("dy").name
    return Plan(recipe.kind, *fmts, power_2, fast, gradient_scale, alpha)


Layout = tuple[Tensor, Tensor]
"""``(FP8 data, GEMM scale)``. An operand has two, by rows and transposed: each is contiguous along the dimension its GEMM contracts."""

QuantizedWeight = tuple[Layout, tuple[Any, Any], Tensor]
"""A weight by rows; transposed, or twice ``None`` where that is not kept; its statistics."""


def quantized_view(
    x: Tensor, operand: Operand, recipe: Recipe, fmt: Float8Format, layout: Layout, stats: Tensor
) -> Quantized:
    """The quantised operand that a probe gets.

    With one scale per tensor: the bytes that the GEMM reads. With more: quantised again by the reference, which gives the
    same bytes (kernel tests) and the amaxes, which the kernels do not write.
    """
    if stats.numel() == 0:
        return recipe.scaling(operand, 1).quantize(x, fmt)
    quantized = Quantized(layout[0][: x.shape[0], : x.shape[1]], stats[2], None, fmt, stats[0])
    return quantized if recipe.scaling(operand, 1).measures_amax else with_amax(quantized, x)
