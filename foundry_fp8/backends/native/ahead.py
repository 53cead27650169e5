"""Weights quantised in the launch of another linear that reads the same input: of key and value beside the query's.

Who reads a norm's output is known from the norm's last forward, in order. What was made of a weight is used only if that linear then
runs with that weight, unchanged; as for inputs that are shared, a write that torch does not count, between two linears, is not seen, but
a linear with hooks is left alone.
"""

from __future__ import annotations

import itertools
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
    if place not in x.readers:
        x.readers.append(place)
    weight, state, ahead, index = x.made.pop(place, _NOTHING)
    if weight is module.weight and _state(weight) == state and ahead.made:
        return ahead.made[index], None
    later = x.expected[x.expected.index(place) + 1 :] if place in x.expected else ()
    fitting = (one for one in later if one not in x.made and _like(one(), module, x))
    found = list(itertools.islice(fitting, OTHERS - 1))  # beside its own
    if not found:
        return None, None
    weights = [reader().weight for reader in found]  # type: ignore[union-attr]
    ahead = Ahead(weights, [(None, None)] * len(found))
    for i, (reader, weight) in enumerate(zip(found, weights, strict=True)):
        x.made[reader] = weight, _state(weight), ahead, i
    return None, ahead


def _like(reader: Any, module: FP8Linear, x: Produced) -> bool:
    """Whether the weight of ``reader`` is now what it will be quantised from, as that of ``module`` is."""
    if type(reader) is not FP8Linear or type(reader.weight) is not nn.Parameter or not is_alone(reader):
        return False
    if reader.recipe is not module.recipe or reader.backend is not module.backend:
        return False
    weight, alike = reader.weight, reader.output_multiplier == module.output_multiplier
    fits = weight.shape == (reader.out_features, x.shape[-1]) and weight.device == x.device
    return alike and fits and weight.is_contiguous() and not weight.is_inference()


_NOTHING = None, None, None, 0


def _state(weight: Tensor) -> tuple[int, int]:
    return weight._version, weight.data_ptr()
