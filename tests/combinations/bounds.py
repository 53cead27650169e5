"""How far a gradient may lie from the reference, by what is switched on. Relative to the ranks' mean norm of that gradient.

An error epsilon in what a GEMM reads becomes a relative error epsilon in what it writes, and independent ones add up as
squares: over the matrices of a path through two blocks, that is :data:`DEPTH` times one of them. Where FP8 quantises behind a
small difference d, values near a rounding edge move by a whole step q: a share d/q of them, so sqrt(d q) in the mean. Where
that share is less than one value, there is one now and then: q of it, in a norm of all of them.
"""

from __future__ import annotations

import math

from torch import Tensor

from tests.combinations.models import LENGTH, WIDTH
from tests.combinations.space import Case

DEPTH = math.sqrt(14)
MARGIN = 3.0
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
FP8_STEP = 2.0**-3
"""E5M2's, relative: the coarsest."""
FEWEST = 2 * LENGTH * WIDTH // 2
"""Values of a microbatch that are quantised together at least: the gradients of Llama's one key head."""
INT8 = 3.5 / 127 / math.sqrt(12)
"""Rounding a block of normal values whose largest is 3.5 standard deviations, rms."""
E4M3 = 2.0**-3 / math.sqrt(12)
E5M2 = 2.0**-2 / math.sqrt(12)
INT8_WORST = math.sqrt(32) / 254
"""Half a step in every element of a block of 32 whose largest element holds the whole norm."""
FLOOR = 2e-3
"""Of the norm of all gradients, for what is lossy: a sum that cancels keeps the noise of what it summed."""

SUMS = 1e-5
"""Another order of float32 sums."""


def relative(case: Case) -> float:
    """Of one parameter's gradient, against the same numerics without the rest, at the weights that its forward was given."""
    independent = []
    for epsilon in _in_backward(case):
        independent.append(DEPTH * epsilon)
        if case.fp8 != "none":
            independent.append(_over_edges(epsilon))
        if case.model == "odd" and _moves_the_forward(case):
            independent.append(_over_kinks(epsilon))
    total = SUMS + MARGIN * math.hypot(*independent)
    if case.gradients != "none":
        total += carried(case) + 2.0**-8
    return total


def carried(case: Case) -> float:
    """Of the same parameter's gradient one step before: what coding left of it, which error feedback adds to this one."""
    if case.gradients == "none":
        return 0.0
    legs = 2 if case.wrapper.startswith("hsdp") else 1
    reductions = 2 if case.accumulation == "two" else 1
    return legs * reductions * INT8_WORST


def gathered(case: Case, weight: Tensor) -> Tensor | float:
    """Of each element of a parameter, between what FSDP shards and what a forward is given: half a step of its code.

    int8's is of the largest value of its block, at most the parameter's; E4M3's of the element's own exponent or the smallest one,
    a scale being within a factor of two of the largest that fits. Current scaling codes what autocast makes of the weight.
    """
    if case.parameters == "none" or weight.dim() < 2:
        return 0.0
    largest = float(weight.abs().max())
    if case.parameters == "int8":
        return (1 + SUMS) * largest / 254
    return (2.0**-4 + 2 * ROUNDOFF[case.dtype]) * weight.abs() + 2.0**-10 * largest / 224


def _moves_the_forward(case: Case) -> bool:
    """Whether activations are computed again from something rounded."""
    return case.compression == "int8" and case.checkpoint != "none"


def _over_edges(epsilon: float) -> float:
    return max(DEPTH * math.sqrt(epsilon * FP8_STEP), FP8_STEP / math.sqrt(FEWEST))


def _over_kinks(epsilon: float) -> float:
    """Of a share epsilon of the values of ``odd`` another slope is taken, which changes what passes by as much as itself."""
    return math.sqrt(epsilon)


def _in_backward(case: Case) -> list[float]:
    found = []
    if case.compression == "exact":
        found.append(4 * ROUNDOFF[case.dtype])  # the same formula, in other steps
    if case.compression == "int8":
        found.append(INT8)
    if case.fused_head:
        found.append(ROUNDOFF[case.dtype])  # of each chunk's part of the head's gradient, other shapes
    return found


def update(learning_rate: float) -> float:
    """Between a gradient and what SGD moved by it, of the larger of a weight's values before and after.

    Half a unit in the last place of the product (at most twice that value) and of the sum.
    """
    return 3 * ROUNDOFF["float32"] / learning_rate


def absolute(case: Case) -> float:
    """Added to the above, of the norm of all gradients together."""
    lossy = case.gradients != "none" or case.compression == "int8"
    return FLOOR if lossy else 1e-7


def numerics(case: Case) -> dict[str, float]:
    """The number formats alone, against float64: the gradient as a whole, and each parameter's."""
    if case.fp8 != "none":
        # A GEMM of the backward reads one operand in each format; what it reads is off by less (a mantissa of 1 has the largest
        # relative step), what amaxes known from other batches cut off comes on top, and shortens. Measured in the triples: 0.28, 0.098,
        # 0.34, all in one row (Llama, one rank, its tied weights, delayed attention); the next have 0.27, 0.040, 0.27.
        turned = MARGIN / 2 * DEPTH * math.hypot(E4M3, E5M2)
        # Noise across a vector makes it longer by half of its square.
        return {"direction": turned, "ratio": turned**2 / 2, "parameter": turned}
    epsilon = ROUNDOFF[case.dtype]
    # float16 at float64's sides of every kink: 5 epsilon. The sides of 2 of 15360 values alone: 16 epsilon, and 96 of one LoRA weight.
    kinks = MARGIN * _over_kinks(epsilon) if case.model == "odd" else 0.0
    return {
        "direction": 16 * epsilon + kinks,
        # What no longer passes shortens by half of its share, what now passes lengthens by as much.
        "ratio": 16 * epsilon + kinks**2 / 2,
        "parameter": 64 * epsilon + kinks,
    }
