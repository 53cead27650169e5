"""The recipe between what a layer was converted with and high precision."""

from __future__ import annotations

import torch

from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe
from foundry_fp8.observe.unchanged_state import FP8Layer

__all__ = ["finer_recipe"]


def finer_recipe(layer: FP8Layer, device: torch.device) -> Recipe | None:
    """``current`` after ``delayed``, ``block`` after ``current``; ``None`` after others, or if the layer's backend does not run it there."""
    configured = layer.configured_recipe
    if not isinstance(configured, DelayedScaling | CurrentScaling):
        return None
    delayed = isinstance(configured, DelayedScaling)
    recipe = CurrentScaling(fp8_format=configured.fp8_format) if delayed else BlockScaling()
    return recipe if layer.can_run(recipe, device) else None
