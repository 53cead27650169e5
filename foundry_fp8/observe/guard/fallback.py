"""The recipe that a layer can run instead of the one it was converted with."""

from __future__ import annotations

from typing import cast

import torch

from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.backend import Backend
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, parse_recipe
from foundry_fp8.observe.unchanged_state import FP8Layer

__all__ = ["finer_recipe"]


def finer_recipe(layer: FP8Layer, finer: str | None, device: torch.device) -> Recipe | None:
    """The recipe between what ``layer`` was converted with and high precision; ``None`` if its backend runs none.

    Args:
        layer: A converted linear or attention.
        finer: As :class:`~.config.GuardConfig` has it.
        device: Where the model runs.
    """
    recipe = _asked_for(layer.configured_recipe, finer)
    if recipe is None:
        return None
    if isinstance(layer, FP8DotProductAttention):
        current = isinstance(recipe, CurrentScaling)
        runs = current and layer.backend.recipe_reason(recipe, layer.grad_scores) is None
    else:
        backend = cast(Backend, layer.backend)
        fits = backend.shape_reason(recipe, layer.in_features, layer.out_features) is None
        runs = fits and backend.availability(recipe, device).ok
    return recipe if runs else None


def _asked_for(configured: Recipe, finer: str | None) -> Recipe | None:
    if finer is None or not configured.for_any_model:
        return None
    if finer != "auto":
        recipe = parse_recipe(finer)
        return None if recipe.name == configured.name else recipe
    if isinstance(configured, DelayedScaling):
        return CurrentScaling(fp8_format=configured.fp8_format)
    return BlockScaling() if isinstance(configured, CurrentScaling) else None
