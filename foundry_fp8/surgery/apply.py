"""``apply_fp8``: convert a model, with no trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from foundry_fp8.backends import Backend, attention_left_out, choose_backend
from foundry_fp8.config import ConfigError, from_mapping
from foundry_fp8.layers.gemm_layer import FP8GemmLayer, configured_recipes
from foundry_fp8.layers.state import FP8State
from foundry_fp8.model_structure.applied import applied, remember
from foundry_fp8.model_structure.unchanged import as_it_was_if_it_fails
from foundry_fp8.surgery.attention import plan_attention
from foundry_fp8.surgery.fp8_config import KEY, TE_LAYERS, FP8Config, resolve_recipe
from foundry_fp8.surgery.frozen_weights import keep_frozen_in_fp8, plan_frozen
from foundry_fp8.surgery.fusion import FusionPlan, plan_fusion
from foundry_fp8.surgery.linears import plan_linears
from foundry_fp8.surgery.published import adopted, check_codes_stay
from foundry_fp8.surgery.report import SurgeryReport
from foundry_fp8.surgery.rules import Measured

__all__ = ["KEY", "FP8Config", "apply_fp8", "refuse_by_backend", "resolve_recipe"]


def apply_fp8(model: nn.Module, *, device: torch.device | str | None = None, **options: Any) -> SurgeryReport:
    """Convert the linear layers of ``model`` to FP8, in place.

    Linears that transformers (FineGrainedFP8) or compressed-tensors loaded in FP8 become plain ones first: frozen weights keep their codes,
    others hold the values. Call it before wrapping with DDP or FSDP and before ``torch.compile``. Parameters keep their identity and names, so an
    optimizer made before or after is fine, and the model's checkpoints are those of the unconverted model.

    Args:
        model: Any module; its root is what training calls.
        device: Where it will run; by default where its parameters are (for ``meta``: the GPU if there is one).
        **options: The fields of :class:`FP8Config`.

    Returns:
        What became of every weight that is multiplied; of a model that the same options converted, what became of it then.

    Raises:
        ConfigError: Unknown option or value, a pattern that matches nothing, a model that other options converted, nothing
            to convert, a recipe that would round published codes again, or ``enabled: false``, which is for who would call this.
        RuntimeError: The backend cannot run the recipe here.

    Example:
        >>> report = apply_fp8(model, recipe="current", exclude=["*.down_proj"])
        >>> print(report.summary())
    """
    config = from_mapping(FP8Config, options, KEY)
    if not config.enabled:
        raise ConfigError(f"{KEY}.enabled: false converts nothing. Do not call this, or set it to true.")
    if (report := applied(model, config, "converted to FP8")) is not None:
        return report  # type: ignore[no-any-return]
    if any(isinstance(module, FP8GemmLayer) for module in model.modules()):
        raise ConfigError(
            f"{KEY}: a part of the model is converted to FP8 already. Convert the whole of it once."
        )
    if any(type(module).__module__.startswith("transformer_engine.") for module in model.modules()):
        raise ConfigError(TE_LAYERS)
    with as_it_was_if_it_fails(model) as undo, adopted(model):
        report = _convert(model, config, _device_of(model) if device is None else torch.device(device), undo)
    remember(model, config, report)
    return report


def _convert(
    model: nn.Module, config: FP8Config, where: torch.device, undo: list[Callable[[], Any]]
) -> SurgeryReport:
    policy = config.policy(where)
    backend, chosen = choose_backend(
        config.backend, policy.recipes, where, f"{KEY}.backend", config.of_backend
    )
    refuse_by_backend(config, backend)
    if config.accumulation != "float32":
        chosen = f"{chosen}; products are added up as {config.accumulation.capitalize()} does"
    linears = plan_linears(model, policy=policy, backend=backend, evaluate=config.evaluate)
    check_codes_stay(linears.converted, KEY)
    recipes = configured_recipes(linears.layers.values())
    fusion = (
        plan_fusion(model, linears.converted) if config.fuse and "fuse" not in backend.lacks else FusionPlan()
    )
    attention = None
    if config.attention:
        attention_recipe = config.attention.recipe or recipes[0]
        if config.attention.recipe is None and len(recipes) > 1:
            raise ConfigError(
                f"{KEY}.attention.recipe: the linears run {len(recipes)} recipes, so that it has to be named."
            )
        left_out = attention_left_out(config.backend, backend, attention_recipe, config.attention.grad_scores)
        if left_out is None:
            attention = plan_attention(
                model,
                recipe=attention_recipe,
                runner=backend.attention(),
                grad_scores=config.attention.grad_scores,
                exclude=config.attention.exclude,
                kept_blocks=policy.kept_blocks(model),
                evaluate=config.evaluate,
            )
        else:
            chosen = f"{chosen}; {left_out}"
    frozen = {}
    if config.frozen_weights == "fp8":
        frozen = plan_frozen(model, linears.converted, f"{KEY}.frozen_weights")
    for recipe in recipes:
        fused, experts = bool(fusion.norms or fusion.mlps), bool(linears.experts)
        backend.self_check(recipe, _compute_dtype(model), where, fused=fused, experts=experts)
    if attention is not None:
        attention.self_check(model, _compute_dtype(model), where)
    linears.carry_out(model)
    fusion.carry_out(model)
    if attention is not None:
        attention.carry_out(model)
    FP8State(model, linears.layers, backend, measured=isinstance(config.recipe, Measured))
    keep_frozen_in_fp8(frozen, f"{KEY}.frozen_weights", undo)
    return SurgeryReport(
        rows=tuple(
            dataclasses.replace(row, reason=f"{row.reason}, its weight kept in FP8 alone")
            if row.name in frozen
            else row
            for row in linears.rows
        ),
        fused=(*fusion.norms, *fusion.mlps),
        not_fused=fusion.left,
        attention=() if attention is None else attention.rows,
        recipes=recipes,
        backend=backend.name,
        chosen=chosen,
    )


def refuse_by_backend(config: FP8Config, backend: Backend) -> None:
    """Raise :class:`ConfigError` for an option that ``backend`` does not have, whatever the model and the machine."""
    for option, reason in backend.lacks.items():
        if (asked := getattr(config, option)) not in (getattr(FP8Config, option), False):
            where = f"{asked}.gemms" if option == "gemms" else f"{KEY}.{option}"
            raise ConfigError(f"{where}: not with the {backend.name} backend: {reason}.")


def _compute_dtype(model: nn.Module) -> torch.dtype:
    """float16 or bfloat16 where the parameters have it; bfloat16, autocast's, for float32 ones."""
    first = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.float16 if first == torch.float16 else torch.bfloat16


def _device_of(model: nn.Module) -> torch.device:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device
