"""What a part of the model can run, from what was asked for to high precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

from foundry_fp8.layers.backend import Backend
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.blocks import block_index_of, transformer_blocks
from foundry_fp8.model_structure.names import clean_name, named_modules_clean
from foundry_fp8.numerics.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Operand,
    Recipe,
    parse_recipe,
)

__all__ = ["OUTSIDE", "Ladder", "ladders_of"]

OUTSIDE = "outside"


class Ladder:
    """The rungs of one unit (a transformer block, or all that lies outside of the blocks), and where it stands.

    Args:
        name: ``layer_003`` or ``outside``.
        modules: Its converted linears by name; none where nothing is in FP8.
        rungs: Recipes from coarse to fine, ``None`` (high precision) last.
    """

    def __init__(self, name: str, modules: Mapping[str, FP8Linear], rungs: Sequence[Recipe | None]) -> None:
        self.name = name
        self.modules = dict(modules)
        self.rungs = list(rungs)
        self.rung = 0

    @property
    def recipe(self) -> str:
        """What the unit runs, in words."""
        recipe = self.rungs[self.rung]
        return "high_precision" if recipe is None else recipe.name

    def rung_of(self, recipe: str) -> int:
        """The rung below the configured one that runs ``recipe``; the next one down where none does.

        Args:
            recipe: A recipe's name, or ``high_precision``.
        """
        names = ["high_precision" if rung is None else rung.name for rung in self.rungs]
        return names.index(recipe, 1) if recipe in names[1:] else 1

    def move(self, rung: int) -> bool:
        """Run rung ``rung`` (bounded by the ladder's ends) from the next forward on; false if that changes nothing."""
        rung = min(max(rung, 0), len(self.rungs) - 1)
        if not self.modules or rung == self.rung:
            return False
        self.rung = rung
        for module in self.modules.values():
            module.set_recipe(self.rungs[rung])
        return True

    def forget_history(self, amax: Mapping[tuple[str, Operand], float]) -> bool:
        """Start the amax histories afresh; true if the unit runs delayed scaling now, so that they matter.

        While a unit is demoted nobody records its amaxes, so on its return the history would hold the very outliers that
        it was demoted for, and scale by them for as long as it is long.

        Args:
            amax: What was measured of each operand last; each becomes the only entry of its history. Without it the first
                pass runs with the old scale.
        """
        if not isinstance(self.rungs[self.rung], DelayedScaling):
            return False
        for name, module in self.modules.items():
            for operand, slot in (module.slots or {}).items():
                slot.amax_history.zero_()
                seen = amax.get((name, operand), 0.0)
                if 0 < seen < math.inf:
                    slot.record(torch.tensor(seen, device=slot.amax_history.device))
        return True


def ladders_of(model: nn.Module, finer: str | None, device: torch.device) -> list[Ladder]:
    """One ladder a transformer block, and one for what lies outside.

    Args:
        model: Wrapped or not.
        finer: The recipe between the configured one and high precision: its name, ``auto`` (current after delayed, block
            after current; none after the others), or ``None``. Left out where the backend cannot run it.
        device: Where the model runs.
    """
    blocks = [(clean_name(name), block) for name, block in transformer_blocks(model)]
    units = [f"layer_{i:03d}" for i in range(len(blocks))] + [OUTSIDE]
    by_unit: dict[str, dict[str, FP8Linear]] = {unit: {} for unit in units}
    for name, module in named_modules_clean(model):
        if isinstance(module, FP8Linear):
            layer = block_index_of(name, blocks)
            by_unit[OUTSIDE if layer is None else f"layer_{layer:03d}"][name] = module
    return [
        Ladder(name, found, _rungs(list(found.values()), finer, device)) for name, found in by_unit.items()
    ]


def _rungs(modules: Sequence[FP8Linear], finer: str | None, device: torch.device) -> list[Recipe | None]:
    if not modules:
        return [None]
    configured = modules[0].configured_recipe
    between = _finer(configured, finer) if configured.for_any_model else None
    backend = cast(Backend, modules[0].backend)  # one instance serves the whole model
    runs = (
        between is not None
        and backend.availability(between, device).ok
        and all(
            backend.shape_reason(between, module.in_features, module.out_features) is None
            for module in modules
        )
    )
    return [configured, between, None] if runs else [configured, None]


def _finer(configured: Recipe, finer: str | None) -> Recipe | None:
    if finer == "auto":
        if isinstance(configured, DelayedScaling):
            return CurrentScaling(fp8_format=configured.fp8_format)
        return BlockScaling() if isinstance(configured, CurrentScaling) else None
    recipe = None if finer is None else parse_recipe(finer)
    return None if recipe is not None and recipe.name == configured.name else recipe
