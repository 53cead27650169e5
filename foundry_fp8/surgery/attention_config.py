"""The YAML under ``algorithms.fp8.attention``."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from foundry_fp8.config import Config, ConfigError, Names, Parse, accept, from_mapping
from foundry_fp8.layers.attention import GradScores, no_attention_form
from foundry_fp8.numerics.recipes import Recipe, parse_recipe

__all__ = ["AttentionConfig", "parse_attention"]

KEY = "algorithms.fp8.attention"


def _recipe_or_that_of_the_linears(value: Any, key: str) -> Recipe | None:
    if value is None:
        return None
    recipe = parse_recipe(value, key)
    reason = no_attention_form(recipe)
    if reason is not None:
        raise ConfigError(f"{key}: {reason}. Take delayed or current.")
    return recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """What a mapping may say; ``attention: true`` stands for the defaults."""

    key = KEY

    recipe: Annotated[Recipe | None, Parse(_recipe_or_that_of_the_linears, "delayed, current or null")] = None
    """``delayed`` or ``current``, or a mapping with the recipe's own fields; ``null``: that of the linears."""
    grad_scores: GradScores = "fp8"
    """What the gradient of the logits is rounded to before the products that make dQ and dK: ``fp8`` is the gradients' format, E5M2;
    ``bfloat16`` is the emulated backend's alone: cuDNN's kernel rounds it to FP8."""
    exclude: Names = ()
    """Globs on the names of attention modules to leave in high precision."""


def parse_attention(value: Any, key: str) -> AttentionConfig | Literal[False]:
    """``true``, ``false``, or a mapping with the fields of :class:`AttentionConfig`.

    Raises:
        ConfigError: Anything else.
    """
    if isinstance(value, AttentionConfig):
        return value
    if isinstance(value, bool) or not hasattr(value, "keys"):
        return AttentionConfig() if accept(bool, value, key) else False
    return from_mapping(AttentionConfig, value, key)
