"""What makes a model µnit-scaled, read off a built one: its width, taus and hidden weights, and what it lacks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.unit_linear import FP8UnitLinear, UnitLinear
from foundry_fp8.model_structure.names import named_modules_clean
from foundry_fp8.models.unit_scaling import KEY

__all__ = ["UnitScaledModel", "initialise_mpt_head", "unit_scaled"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitScaledModel:
    """A µnit-scaled model's description.

    Attributes:
        width: Of the residual stream.
        taus: The residual coefficients in use, without repetition.
        hidden: Names of the hidden weights, as the model was built (without wrappers' parts).
        final_norm: Whether a LayerNorm follows the last block.
    """

    width: int
    taus: tuple[float, ...]
    hidden: frozenset[str]
    final_norm: bool


def unit_scaled(model: nn.Module) -> UnitScaledModel:
    """Describe ``model``.

    Raises:
        ConfigError: It is not µnit-scaled, or only in part.
    """
    config = next((c for m in model.modules() if (c := getattr(m, "config", None)) is not None), None)
    linears = {
        name: module
        for name, module in named_modules_clean(model)
        if isinstance(module, UnitLinear | FP8UnitLinear)
    }
    width = getattr(config, "d_model", None) or getattr(config, "hidden_size", None)
    if not linears or not isinstance(width, int):
        raise ConfigError(
            f"{KEY}: the model is not µnit-scaled: no layer has an output multiplier. Use model.name: mus_causal_lm, or MPT "
            "with fc_type: {name: unit}; for other models remove the algorithm."
        )
    if hasattr(config, "d_model"):
        _check_mpt(config)
    hidden = {name for name in linears if name.rpartition(".")[2] != "lm_head"}
    for name in sorted(hidden):
        alpha = linears[name].output_multiplier
        if not math.isclose(alpha, linears[name].in_features ** -0.5):
            raise ConfigError(
                f"{KEY}: {name} multiplies by {alpha:g}, not by 1/sqrt({linears[name].in_features}): its learning rate would not "
                f"transfer. Remove model.{'fc_type.output_multiplier' if hasattr(config, 'd_model') else 'hidden_multiplier'}; an "
                "exported checkpoint, which has it, is for serving."
            )
    found = {getattr(module, "tau", None) for module in model.modules()}
    taus = sorted(tau for tau in found if isinstance(tau, float))
    final_norm = getattr(config, "norm_type", None) == "mus_norm" or getattr(config, "final_norm", False)
    weights = frozenset(f"{name}.weight" for name in hidden)
    return UnitScaledModel(width=width, taus=tuple(taus), hidden=weights, final_norm=final_norm)


def initialise_mpt_head(model: nn.Module) -> None:
    """Draw MPT's untied head from N(0, 1) where LLM Foundry has left torch's default.

    LLM Foundry 0.22 calls its ``init_config`` for the head on the meta device alone (``MPTModel`` initialises itself, and the
    head is its owner's). torch's default is uniform within 1/sqrt(d_model), which no µnit-scaled head is.
    """
    for module in model.modules():
        head = getattr(module, "lm_head", None)
        if type(head) is nn.Linear and hasattr(getattr(module, "config", None), "d_model"):
            weight = head.weight
            if not weight.is_meta and float(weight.detach().abs().max()) <= head.in_features**-0.5:
                nn.init.normal_(weight)


def _check_mpt(config: Any) -> None:
    """MPT takes its parts one by one; each that is missing would break unit variance in silence."""
    attention, ffn = config.attn_config, config.ffn_config
    head = 1 / config.d_model
    scale = config.logit_scale
    for part, found, right, expected in (
        ("norm_type", config.norm_type, config.norm_type in ("mus_norm", "no_norm"), "mus_norm (no_norm: without the final norm)"),
        ("learned_pos_emb", config.learned_pos_emb, not config.learned_pos_emb, "false (use attn_config.rope)"),
        ("attn_config.rope", attention.get("rope"), bool(attention.get("rope")), "true (it has no other positions)"),
        ("tie_word_embeddings", config.tie_word_embeddings, not config.tie_word_embeddings, "false"),
        (
            "logit_scale",
            scale,
            isinstance(scale, float) and abs(scale - head) <= 1e-6 * head,
            f"1/d_model = {head!r}, the head's output multiplier",
        ),
        ("init_config.name", config.init_config.get("name"), config.init_config.get("name") == "unit_normal_", "unit_normal_"),
        ("attn_config.attn_type", attention.get("attn_type"), attention.get("attn_type") == "mus_attention", "mus_attention"),
        ("ffn_config.ffn_type", ffn.get("ffn_type"), ffn.get("ffn_type") == "mus_ffn", "mus_ffn"),
        ("attn_config.tau", attention.get("tau"), attention.get("tau") == ffn.get("tau"), "the same as ffn_config.tau"),
    ):  # fmt: skip
        if not right:
            raise ConfigError(f"{KEY}: model.{part}: {found!r}; in a µnit-scaled MPT it is {expected}.")
