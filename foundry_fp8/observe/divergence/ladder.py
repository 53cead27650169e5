"""What one layer can run, from what was asked for to high precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.backend import Backend
from foundry_fp8.layers.linear import OPERANDS, FP8Linear
from foundry_fp8.model_structure.blocks import block_index_of, transformer_blocks
from foundry_fp8.model_structure.names import clean_name, named_modules_clean
from foundry_fp8.numerics.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    parse_recipe,
)
from foundry_fp8.observe.divergence.attention_watch import ATTENTION_OPERANDS

__all__ = ["OUTSIDE", "Ladder", "ladders_of", "units_of"]

OUTSIDE = "outside"


class Ladder:
    """The rungs of one converted linear or attention, and where it stands.

    Args:
        name: Its name in the model.
        unit: The block it is in (:func:`units_of`).
        module: The layer.
        rungs: Recipes from coarse to fine, ``None`` (high precision) last.
    """

    def __init__(
        self, name: str, unit: str, module: FP8Linear | FP8DotProductAttention, rungs: Sequence[Recipe | None]
    ) -> None:
        self.name = name
        self.unit = unit
        self.module = module
        self.rungs = list(rungs)
        self.rung = 0

    @property
    def recipes(self) -> list[str]:
        """The rungs in words."""
        return ["high_precision" if rung is None else rung.name for rung in self.rungs]

    @property
    def operands(self) -> tuple[str, ...]:
        """What of it is measured."""
        return OPERANDS if isinstance(self.module, FP8Linear) else ATTENTION_OPERANDS

    @property
    def above(self) -> Recipe | None:
        """What it would run if it were promoted; ``None`` where it runs what is configured."""
        return self.rungs[self.rung - 1] if self.rung else None

    def move(self, rung: int) -> None:
        """Run rung ``rung`` from the next forward on."""
        self.rung = rung
        self.module.set_recipe(self.rungs[rung])  # type: ignore[arg-type]

    def forget_history(self, amax: Mapping[str, float]) -> None:
        """Start the amax histories afresh, so that they do not hold the very outliers that the layer was demoted for.

        Args:
            amax: What was measured last, by slot; each becomes the only entry of its history. Without it the first pass runs with
                the old scale.
        """
        for name, slot in (self.module.slots or {}).items():
            slot.amax_history.zero_()
            seen = amax.get(name, 0.0)
            if 0 < seen < math.inf:
                slot.record(torch.tensor(seen, device=slot.amax_history.device))


def units_of(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """The blocks of ``model``, ``outside`` last, and the block of every module by name."""
    blocks = [(clean_name(name), block) for name, block in transformer_blocks(model)]
    of = {}
    for name, _ in named_modules_clean(model):
        layer = block_index_of(name, blocks)
        of[name] = OUTSIDE if layer is None else f"layer_{layer:03d}"
    return [*(f"layer_{i:03d}" for i in range(len(blocks))), OUTSIDE], of


def ladders_of(model: nn.Module, finer: str | None, device: torch.device) -> dict[str, Ladder]:
    """One ladder a converted linear or attention, by name.

    Args:
        model: Wrapped or not.
        finer: The recipe between the configured one and high precision: its name, ``auto`` (current after delayed, block
            after current; none after the others), or ``None``. Left out where the backend cannot run it.
        device: Where the model runs.
    """
    _, units = units_of(model)
    found = {}
    for name, module in named_modules_clean(model):
        if isinstance(module, FP8Linear | FP8DotProductAttention):
            between = _between(module, finer, device)
            rungs = [module.configured_recipe, *([] if between is None else [between]), None]
            found[name] = Ladder(name, units[name], module, rungs)
    return found


def _between(
    module: FP8Linear | FP8DotProductAttention, finer: str | None, device: torch.device
) -> Recipe | None:
    configured = module.configured_recipe
    between = _finer(configured, finer) if configured.for_any_model else None
    if between is None:
        return None
    if isinstance(module, FP8DotProductAttention):
        runs = (
            isinstance(between, CurrentScaling)
            and module.backend.recipe_reason(between, module.grad_scores) is None
        )
    else:
        backend = cast(Backend, module.backend)
        runs = (
            backend.availability(between, device).ok
            and backend.shape_reason(between, module.in_features, module.out_features) is None
        )
    return between if runs else None


def _finer(configured: Recipe, finer: str | None) -> Recipe | None:
    if finer == "auto":
        if isinstance(configured, DelayedScaling):
            return CurrentScaling(fp8_format=configured.fp8_format)
        return BlockScaling() if isinstance(configured, CurrentScaling) else None
    recipe = None if finer is None else parse_recipe(finer)
    return None if recipe is not None and recipe.name == configured.name else recipe
