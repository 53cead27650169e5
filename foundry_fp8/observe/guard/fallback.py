"""The recipe between what a layer was converted with and high precision."""

from __future__ import annotations

from typing import cast

import torch

from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.backend import Backend
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
    if isinstance(layer, FP8DotProductAttention):
        current = isinstance(recipe, CurrentScaling)
        runs = current and layer.backend.recipe_reason(recipe, layer.grad_scores) is None
    else:
        backend = cast(Backend, layer.backend)
        fits = backend.shape_reason(recipe, layer.in_features, layer.out_features) is None
        runs = fits and backend.availability(recipe, device).ok
    return recipe if runs else None
