"""A recipe for each block and role, chosen by what FP8 does to the gradients of one batch."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from foundry_fp8.backends.size_rule import saved_seconds
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from foundry_fp8.model_structure.block_numbers import format_blocks
from foundry_fp8.model_structure.blocks import block_index_of, transformer_stacks
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.model_structure.roles import roles_of
from foundry_fp8.numerics.recipes import FOR_ANY_MODEL, RECIPES, Recipe, recipe_name
from foundry_fp8.observe.precision_probe import LossOf, PrecisionProbe
from foundry_fp8.surgery.report import as_text

__all__ = ["COLUMNS", "Decision", "MeasuredPolicy", "measure_policy"]

ROUNDS = 8
"""Choices that are measured as a whole before all layers stay in high precision."""
COLUMNS = ("unit", "recipe", "error alone", "not taken")
LARGEST = 1e9
"""What an error that is not finite counts as."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the layers of one role in one block run, and the number that decided it.

    Attributes:
        unit: ``layer_003 mlp``.
        block: Its number; ``None`` outside of blocks, and in a model of an encoder and a decoder.
        recipe: ``None`` is high precision.
        error: Of the gradient, worst block, with this unit alone in FP8: in its recipe, or, if it has none, in the best one. NaN where no unit
            was measured alone.
        faster: The next faster recipe, which was not taken, and the error with it.
    """

    unit: str
    layers: Sequence[str]
    block: int | None
    role: str
    recipe: Recipe | None
    error: float
    faster: str = ""


@dataclasses.dataclass(frozen=True)
class MeasuredPolicy:
    """The choice for a model.

    Attributes:
        decisions: One a unit, in the model's order.
        total: The gradient error, worst block, of the whole choice, measured.
        error: The limit.
        passes: Forwards and backwards that it took.
    """

    decisions: Sequence[Decision]
    total: float
    error: float
    passes: int

    @property
    def recipes(self) -> dict[str, Recipe | None]:
        """By layer."""
        return {name: decision.recipe for decision in self.decisions for name in decision.layers}

    @property
    def why(self) -> dict[str, str]:
        """By layer, the next faster recipe and the gradient error with it, for which it was not taken."""
        return {name: decision.faster for decision in self.decisions for name in decision.layers}

    def rules(self) -> list[dict[str, Any]]:
        """The ``recipe`` of a YAML that says the same: a rule for what differs from most layers, and one for the rest."""
        common, _ = Counter(self.recipes.values()).most_common(1)[0]
        groups: dict[tuple[Recipe | None, str], list[Decision]] = {}
        for one in self.decisions:
            groups.setdefault((one.recipe, "" if one.block is None else one.role), []).append(one)
        found: list[dict[str, Any]] = []
        for (recipe, role), ones in groups.items():
            where: dict[str, Any] = {"modules": [name for one in ones for name in one.layers]}
            if role:
                blocks = format_blocks(one.block for one in ones if one.block is not None)
                where = {"blocks": blocks, "roles": [role]}
            if recipe != common:
                found.append({**where, "recipe": recipe_name(recipe)})
        return found if common is None else [*found, {"recipe": recipe_name(common)}]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Unit, recipe, error and what was not taken, in words."""
        return [
            (
                one.unit,
                recipe_name(one.recipe),
                "" if math.isnan(one.error) else f"{one.error:.1%}",
                one.faster,
            )
            for one in self.decisions
        ]

    def summary(self) -> str:
        """:meth:`rows` for a terminal, and a line on the whole."""
        said = f"gradient error {self.total:.1%} in the worst block, limit {self.error:.0%}"
        if not any(self.recipes.values()):
            said = f"every recipe is off by more than {self.error:.0%} in some block; all layers stay in high precision"
        return f"{as_text(COLUMNS, self.rows())}{said} ({self.passes} passes)"


def measure_policy(
    model: nn.Module, loss_of: LossOf, batch: Any, *, error: float = 0.2, recipes: Sequence[str] = ()
) -> MeasuredPolicy:
    """Choose the fastest recipe for each block and role with which the gradient error of the whole stays below ``error``.

    First everything is measured in the fastest recipe. If that is too much, each unit alone in each recipe; errors of units add up
    as squares, and those that cost most for the FLOPs that they save take slower recipes, until a measurement of the whole agrees.

    Args:
        model: As ``apply_fp8(model, recipe="measured")`` leaves it, wrapped or not, in training mode; it stays as it is.
        loss_of: The loss of a training forward.
        batch: Is run many times; every rank calls this with one of its own.
        error: The limit of the relative error of a block's gradient.
        recipes: To choose from; all that the backend runs here if empty.

    Returns:
        The choice, the same on all ranks.

    Raises:
        RuntimeError: Out of memory, or FSDP1 holds gradients.
        TypeError: The loss is not a scalar, or ``batch`` can be run once only.
    """
    probe = PrecisionProbe(model, loss_of)
    linears = {name: layer for name, layer in probe.layers.items() if isinstance(layer, FP8GemmLayer)}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    candidates = {name: _candidates(layer, recipes, device) for name, layer in linears.items()}
    roles = roles_of(probe.model, linears)
    units: dict[str, list[str]] = {}
    for name in linears:
        units.setdefault(f"{probe.block_of(name)} {roles.get(name, '')}".strip(), []).append(name)
    unit_of = {name: unit for unit, names in units.items() for name in names}
    choices = {
        unit: [*(r for r in candidates[names[0]] if all(r in candidates[n] for n in names)), None]
        for unit, names in units.items()
    }
    sizes = {unit: sum(linears[n].in_features * linears[n].out_features for n in names) for unit, names in units.items()}  # fmt: skip

    with probe.on(batch) as measure:  # so that delayed scaling knows amaxes of this batch
        measure({name: layer.configured_recipe for name, layer in linears.items()})
    with probe.on(batch) as measure:

        def whole(pick: Mapping[str, int]) -> float:
            gap = measure({name: choices[unit_of[name]][pick[unit_of[name]]] for name in linears})
            return gap.worst[1] if gap.meaningful else math.inf

        search = _Search(choices, sizes, error)
        total = whole(search.pick)
        if not total < error:
            for unit, names in units.items():
                for place, recipe in enumerate(choices[unit][:-1]):
                    gap = measure(dict.fromkeys(names, recipe))
                    search.errors[unit, place] = {n: _finite(e) for n, e in gap.block_error.items()}
            total = search.run(whole)
    stacks = transformer_stacks(probe.model)
    blocks = [(clean_name(name), block) for name, block in stacks[0]] if len(stacks) == 1 else []
    decisions = []
    for unit, names in units.items():
        block, role = block_index_of(names[0], blocks), roles.get(names[0], "")
        decisions.append(Decision(unit, names, block, role, *search.outcome(unit)))
    return MeasuredPolicy(decisions, total, error, probe.passes)


class _Search:
    """Which place of its choices each unit takes."""

    def __init__(
        self, choices: Mapping[str, Sequence[Recipe | None]], sizes: Mapping[str, int], limit: float
    ) -> None:
        self.choices, self.sizes, self.limit = choices, sizes, limit
        self.pick = dict.fromkeys(choices, 0)
        self.errors: dict[tuple[str, int], Mapping[str, float]] = {}

    def run(self, measured: Callable[[Mapping[str, int]], float]) -> float:
        target = self.limit
        for _ in range(ROUNDS):
            self._slow_down(target)
            total = measured(self.pick)
            if total < self.limit:
                return total
            target = self._predicted()[1] * min(0.9, self.limit / _finite(total))
        self.pick = {unit: len(choices) - 1 for unit, choices in self.choices.items()}
        return 0.0

    def _slow_down(self, target: float) -> None:
        while True:
            block, worst = self._predicted()
            if worst < target:
                return
            moves = [
                ((self._at(unit, here, block) - self._at(unit, place, block)) / ((place - here) * self.sizes[unit]), unit, place)
                for unit, here in self.pick.items()
                for place in range(here + 1, len(self.choices[unit]))
            ]  # fmt: skip
            gain, unit, place = max(moves, key=lambda move: move[0], default=(0.0, "", 0))
            if not gain > 0:
                return
            self.pick[unit] = place

    def _at(self, unit: str, place: int, block: str) -> float:
        return self.errors.get((unit, place), {}).get(block, 0.0) ** 2

    def _predicted(self) -> tuple[str, float]:
        """The block with the largest error, and that error."""
        blocks = {block for of_unit in self.errors.values() for block in of_unit}
        sums = {b: math.sqrt(sum(self._at(u, p, b) for u, p in self.pick.items())) for b in sorted(blocks)}
        return max(sums.items(), key=lambda item: item[1], default=("", 0.0))

    def outcome(self, unit: str) -> tuple[Recipe | None, float, str]:
        """The last three fields of a :class:`Decision`."""
        place, choices = self.pick[unit], self.choices[unit]
        found = (self.errors.get((unit, p), {}).values() for p in range(len(choices) - 1))
        worst = [max(errors, default=math.nan) for errors in found]
        error = worst[place] if place < len(worst) else min(worst, default=math.nan)
        faster = f"{recipe_name(choices[place - 1])} {worst[place - 1]:.1%}" if place else ""
        return choices[place], error, faster


def _candidates(layer: FP8GemmLayer, names: Sequence[str], device: torch.device) -> list[Recipe]:
    """What ``layer`` can run, the fastest first."""
    own = layer.configured_recipe
    made = [RECIPES[name]() for name in names or FOR_ANY_MODEL]
    made = [own if own is not None and type(recipe) is type(own) else recipe for recipe in made]
    runs = [r for r in made if (not r.uses_history or r == own) and layer.can_run(r, device)]
    return sorted(runs, key=lambda r: -saved_seconds(r, 1, layer.in_features, layer.out_features))


def _finite(error: float) -> float:
    return error if error < LARGEST else LARGEST
