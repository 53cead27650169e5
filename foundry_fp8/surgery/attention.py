"""FP8 attention for a whole model: which modules, their delayed-scaling state, and the report of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, cast

from torch import nn

from foundry_fp8.backends import load_attention_backend
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.attention import (
    AttentionRecipe,
    FP8DotProductAttention,
    attention_format,
    attention_slots,
)
from foundry_fp8.layers.delayed_scaling import (
    FRESH_STATE,
    DelayedScalingState,
    ModuleScales,
    same_scaling,
)
from foundry_fp8.model_structure.blocks import block_index_of, transformer_blocks
from foundry_fp8.model_structure.selection import check_patterns_match, matches
from foundry_fp8.numerics.recipes import DelayedScaling, Recipe
from foundry_fp8.surgery.attention_hosts import HOSTS, AttentionHost
from foundry_fp8.surgery.attention_inputs import BatchMasks
from foundry_fp8.surgery.report import SurgeryRow

__all__ = ["AttentionPlan", "FP8AttentionState", "convert_attention", "plan_attention"]

_FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """What a conversion will do to the attention modules of a model.

    Attributes:
        rows: One an attention module.
        converted: The FP8 attentions by the names of the modules that they will serve.
        hosts: How each gets into its module.
        recipe: What they run.
    """

    rows: tuple[SurgeryRow, ...]
    converted: Mapping[str, FP8DotProductAttention]
    hosts: Mapping[str, AttentionHost]
    recipe: AttentionRecipe

    def carry_out(self, model: nn.Module) -> None:
        """Attach them, and leave their state on ``model``."""
        masks = BatchMasks.of(model)
        for name, attention in self.converted.items():
            module = model.get_submodule(name)
            attention.train(module.training)
            self.hosts[name].attach(module, attention, masks)
        FP8AttentionState(model, self.converted, self.recipe)


def convert_attention(
    model: nn.Module, **options: Any
) -> tuple[tuple[SurgeryRow, ...], Mapping[str, FP8DotProductAttention]]:
    """Let the attention modules of ``model`` run their GEMMs in FP8, in place.

    Parameters and ``state_dict`` do not change. The delayed-scaling state is found again by
    ``FP8AttentionState.of(model)``; it updates itself when a training forward of ``model`` begins.

    Args:
        model: Any module; its root is what training calls.
        **options: Those of :func:`plan_attention`.

    Returns:
        A row an attention module, and the FP8 attentions by the names of the modules that they serve.

    Raises:
        ConfigError: See :func:`plan_attention`; nothing is changed then.
    """
    plan = plan_attention(model, **options)
    plan.carry_out(model)
    return plan.rows, plan.converted


def plan_attention(
    model: nn.Module,
    *,
    recipe: Recipe,
    backend: str = "emulated",
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    kept_blocks: Collection[int] = (),
    evaluate: Literal["fp8", "high_precision"] = "high_precision",
    key: str = "algorithms.fp8.attention",
) -> AttentionPlan:
    """Choose the attention modules of ``model`` that run their GEMMs in FP8; the model stays as it is.

    Args:
        model: Any module; its root is what training calls.
        recipe: Delayed or current; under current scaling S and dP still have delayed scales, as in TE.
        backend: Who runs it.
        include: Globs on the names of attention modules to consider.
        exclude: Globs on the names to leave out.
        kept_blocks: Indices of transformer blocks left in high precision.
        evaluate: What ``eval()`` mode runs in.
        key: The YAML key, for messages.

    Raises:
        ConfigError: A recipe or backend without an attention form, a pattern that matches nothing, or nothing to convert.
    """
    runner = load_attention_backend(backend)
    if runner is None:
        raise ConfigError(
            f"{key}: the {backend} backend has no FP8 attention. Set backend: transformer_engine (backend: emulated to "
            "check numerics), or attention: false."
        )
    refused = runner.recipe_reason(recipe)
    if refused is not None:
        raise ConfigError(f"{key}: {refused}. Set recipe: delayed, or attention: false.")
    attention_recipe = cast(AttentionRecipe, recipe)
    found = [
        (name, module, host)
        for name, module in model.named_modules()
        for host in HOSTS
        if host.recognises(module)
    ]
    names = [name for name, _, _ in found]
    if include != ("*",):
        check_patterns_match(include, names, f"{key}.include", "attention modules")
    check_patterns_match(exclude, names, f"{key}.exclude", "attention modules")
    blocks = transformer_blocks(model)
    rows: list[SurgeryRow] = []
    converted: dict[str, FP8DotProductAttention] = {}
    hosts: dict[str, AttentionHost] = {}
    for name, module, host in found:
        reason = host.reason(module)
        if reason is None and (not matches(name, include) or matches(name, exclude)):
            reason = f"{key}.include and exclude leave it out"
        if reason is None and block_index_of(name, blocks) in kept_blocks:
            reason = "it is in a block that stays in high precision"
        if reason is None:
            reason = runner.module_reason(attention_recipe, getattr(module, "head_dim", None))
        if reason is None:
            hosts[name] = host
            converted[name] = FP8DotProductAttention(
                fqn=name, recipe=attention_recipe, backend=runner, evaluate=evaluate
            )
        rows.append(
            SurgeryRow(
                name=name,
                action="converted" if reason is None else "skipped",
                reason=f"{recipe.name}, in a {host.name} attention" if reason is None else reason,
            )
        )
    if not converted:
        said = "; ".join(f"{row.name}: {row.reason}" for row in rows[:3])
        raise ConfigError(
            f"{key}: no attention was converted ({said or 'no module of a known kind'}). Known are MPT with "
            "attn_impl: torch, Hugging Face models that use the attention interface (FOG's too), and modules whose "
            "forward calls scaled_dot_product_attention. Set attention: false to convert linear layers alone."
        )
    return AttentionPlan(tuple(rows), converted, hosts, attention_recipe)


class FP8AttentionState:
    """The delayed-scaling state of all converted attentions, updated like that of the linears.

    Args:
        model: The root that is called in training.
        modules: The FP8 attentions by name.
        recipe: What they were converted to.
    """

    _ATTRIBUTE = "_foundry_fp8_attention_state"

    def __init__(
        self, model: nn.Module, modules: Mapping[str, FP8DotProductAttention], recipe: AttentionRecipe
    ) -> None:
        self.modules = dict(modules)
        self.recipe = recipe
        self.slots = attention_slots(recipe)
        timing = (
            recipe if isinstance(recipe, DelayedScaling) else DelayedScaling(fp8_format=recipe.fp8_format)
        )
        fp8_max = {slot: attention_format(recipe, slot).max for slot in self.slots}
        self._scales = ModuleScales(timing, list(self.modules), fp8_max, "FP8 attention state")
        for name, module in self.modules.items():
            module.slots = self._scales.slots(name)
        setattr(model, self._ATTRIBUTE, self)
        self._scales.attach(model)

    @classmethod
    def of(cls, model: nn.Module) -> FP8AttentionState | None:
        """The state of a converted model, wrapped or not, or ``None``."""
        for module in model.modules():
            state = module.__dict__.get(cls._ATTRIBUTE)
            if state is not None:
                return state
        return None

    @property
    def delayed(self) -> DelayedScalingState:
        """The scales and histories."""
        return self._scales.state

    def update(self) -> None:
        """Finish the running pass: a collective, so every rank calls it. Twice is as good as once."""
        self._scales.state.update()

    def state_dict(self) -> dict[str, Any]:
        """Loads with ``weights_only=True``.

        Returns:
            ``version``, ``recipe``, ``slots`` (their names), ``modules``: name -> ``scale`` ``[slots]`` and ``amax_history``
            ``[L, slots]``.
        """
        return {
            "version": _FORMAT_VERSION,
            "recipe": self.recipe.to_dict(),
            "slots": list(self.slots),
            "modules": self._scales.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave.

        Raises:
            RuntimeError: The state is of another recipe, version or model, or damaged; nothing is changed then.
        """
        mine = {"version": _FORMAT_VERSION, "recipe": self.recipe.to_dict(), "slots": list(self.slots)}
        for key, value in mine.items():
            same = (
                same_scaling(state.get(key, {}), self.recipe) if key == "recipe" else state.get(key) == value
            )
            if not same:
                raise RuntimeError(
                    f"the checkpoint's FP8 attention state has {key} {state.get(key)!r}, this run {value!r}. {FRESH_STATE}"
                )
        self._scales.load_state_dict(state["modules"])
