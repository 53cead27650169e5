"""Weights quantised in the launch of another linear that reads the same input: of key and value beside the query's.

Who reads a norm's output is known from the norm's last forward, in order. What was made of a weight is used only if that linear then
runs with that weight, unchanged; as for inputs that are shared, a write that torch does not count, between two linears, is not seen, but
a linear with hooks is left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from foundry_fp8.backends.native.inputs import Delayed, is_alone
from foundry_fp8.backends.native.plan import QuantizedWeight
from foundry_fp8.kernels.tensorwise import OTHERS
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.produced import Produced

__all__ = ["Ahead", "ahead_of"]


class Ahead:
    """What one linear quantises for others.

    Args:
        weights: ``[N, K]`` each, hp, contiguous, of linears with one plan.
        states: Delayed scaling's state of each.

    Attributes:
        made: Each quantised; empty where that was not possible.
    """

    def __init__(self, weights: Sequence[Tensor], states: Sequence[Delayed]) -> None:
        self.weights, self.states = weights, states
        self.made: list[QuantizedWeight] = []


def ahead_of(module: FP8Linear, x: Produced) -> tuple[QuantizedWeight | None, Ahead | None]:
    """The weight of ``module``, if another linear that read ``x`` has quantised it; otherwise what to quantise for those that will.

    Not for delayed scaling, which counts who asks for its scales.
    """
    place = weakref.ref(module)
    x.readers.append(place)
    weight, state, ahead, index = x.made.pop(place, _NOTHING)
    if weight is module.weight and _state(weight) == state and ahead.made:
        return ahead.made[index], None
    found: list[Any] = []
    later = x.expected[x.expected.index(place) + 1 :][:OTHERS] if place in x.expected else ()
    for reader in later:
        member: Any = reader()
        if type(member) is not FP8Linear or type(member.weight) is not nn.Parameter or not is_alone(member):
            continue
        weight, alike = member.weight, member.recipe is module.recipe and member.backend is module.backend
        fits = weight.shape == (member.out_features, x.shape[-1]) and weight.is_contiguous()
        if (
            alike
            and fits
            and weight.device == x.device
            and member.output_multiplier == module.output_multiplier
        ):
            found.append((reader, weight))
    if not found:
        return None, None
    ahead = Ahead([weight for _, weight in found], [(None, None)] * len(found))
    for i, (reader, weight) in enumerate(found):
        x.made[reader] = weight, _state(weight), ahead, i
    return None, ahead


_NOTHING = None, None, None, 0


def _state(weight: Tensor) -> tuple[int, int]:
    return weight._version, weight.data_ptr()
