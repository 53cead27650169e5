"""FP8 attention for a whole model: which modules, their delayed-scaling state, and the report of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.attention import (
    AttentionBackend,
    AttentionRecipe,
    FP8DotProductAttention,
    GradScores,
    attention_format,
    attention_slots,
)
from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.layers.model_state import ModelState, readable
from foundry_fp8.layers.module_scales import ModuleScales
from foundry_fp8.model_structure.blocks import block_index_of, transformer_blocks
from foundry_fp8.model_structure.selection import check_patterns_match, matches
from foundry_fp8.numerics.recipes import DelayedScaling, Recipe
from foundry_fp8.surgery.attention_hosts import HOSTS, AttentionHost
from foundry_fp8.surgery.attention_inputs import BatchMasks
from foundry_fp8.surgery.report import Action, SurgeryRow

__all__ = ["AttentionPlan", "FP8AttentionState", "check_attention_recipe", "plan_attention"]

KEY = "algorithms.fp8.attention"


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

    def self_check(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Prove the kernels for every head size that is known, before anything is changed.

        Raises:
            RuntimeError: One of them is wrong on this machine.
        """
        sizes = {
            getattr(model.get_submodule(name), "head_dim", None): a for name, a in self.converted.items()
        }
        for head_dim, attention in sizes.items():
            if isinstance(head_dim, int):
                attention.backend.self_check(self.recipe, head_dim, dtype, device)

    def carry_out(self, model: nn.Module) -> None:
        """Attach them, and leave their state on ``model``."""
        masks = BatchMasks.of(model)
        for name, attention in self.converted.items():
            module = model.get_submodule(name)
            attention.train(module.training)
            self.hosts[name].attach(module, attention, masks)
        FP8AttentionState(model, self.converted, self.recipe)


def check_attention_recipe(
    runner: AttentionBackend, recipe: Recipe, grad_scores: GradScores, key: str = KEY
) -> None:
    """Raise :class:`ConfigError` for a recipe without an attention form on this backend."""
    refused = runner.recipe_reason(recipe, grad_scores)
    if refused is not None:
        way_out = (
            "Set recipe: delayed" if grad_scores == "fp8" else "Set grad_scores: fp8, or backend: emulated"
        )
        raise ConfigError(f"{key}: {refused}. {way_out}, or attention: false.")


def plan_attention(
    model: nn.Module,
    *,
    recipe: Recipe,
    runner: AttentionBackend,
    grad_scores: GradScores = "fp8",
    exclude: Sequence[str] = (),
    kept_blocks: Collection[int] = (),
    evaluate: Literal["fp8", "high_precision"] = "high_precision",
    key: str = KEY,
) -> AttentionPlan:
    """Choose the attention modules of ``model`` that run their GEMMs in FP8; the model stays as it is.

    Args:
        model: Any module; its root is what training calls.
        recipe: Delayed or current; under current scaling S and dP still have delayed scales, as in TE.
        runner: Who runs it.
        grad_scores: What the gradient of the logits is rounded to.
        exclude: Globs on the names of attention modules to leave out.
        kept_blocks: Indices of transformer blocks left in high precision.
        evaluate: What ``eval()`` mode runs in.
        key: The YAML key, for messages.

    Raises:
        ConfigError: A recipe without an attention form on this backend, a pattern that matches nothing, or nothing to convert.
    """
    check_attention_recipe(runner, recipe, grad_scores, key)
    attention_recipe = cast(AttentionRecipe, recipe)
    modules = list(model.named_modules())
    found = [(name, module, host) for name, module in modules for host in HOSTS if host.recognises(module)]
    names = [name for name, _, _ in found]
    check_patterns_match(exclude, names, f"{key}.exclude", "attention modules")
    blocks = transformer_blocks(model)
    runs = recipe.name + ("" if grad_scores == "fp8" else f" with the logits' gradients in {grad_scores}")
    rows: list[SurgeryRow] = []
    converted: dict[str, FP8DotProductAttention] = {}
    hosts: dict[str, AttentionHost] = {}
    for name, module, host in found:
        reason = host.reason(module)
        if reason is None and matches(name, exclude):
            reason = f"{key}.exclude leaves it out"
        if reason is None and block_index_of(name, blocks) in kept_blocks:
            reason = "it is in a block that stays in high precision"
        if reason is None:
            reason = runner.module_reason(attention_recipe, getattr(module, "head_dim", None))
        if reason is None:
            hosts[name] = host
            converted[name] = FP8DotProductAttention(
                fqn=name, recipe=attention_recipe, backend=runner, evaluate=evaluate, grad_scores=grad_scores
            )
        became = f"{runs}, in a {host.name} attention"
        action: Action = "converted" if reason is None else "skipped"
        rows.append(SurgeryRow(name=name, action=action, reason=reason or became))
    if not converted:
        said = "; ".join(f"{row.name}: {row.reason}" for row in rows[:3])
        raise ConfigError(
            f"{key}: no attention was converted ({said or 'no module of a known kind'}). Known are MPT with "
            "attn_impl: torch, Hugging Face models that use the attention interface (FOG's too), and modules whose "
            "forward calls scaled_dot_product_attention. Set attention: false to convert linear layers alone."
        )
    return AttentionPlan(tuple(rows), converted, hosts, attention_recipe)


class FP8AttentionState(ModelState):
    """The delayed-scaling state of all converted attentions, updated like that of the linears.

    Args:
        model: The root that is called in training.
        modules: The FP8 attentions by name.
        recipe: What they were converted to.
    """

    NAME = "FP8 attention state"

    def __init__(
        self, model: nn.Module, modules: Mapping[str, FP8DotProductAttention], recipe: AttentionRecipe
    ) -> None:
        self.modules = dict(modules)
        self.recipe = recipe
        self.slots = attention_slots(recipe)
        timing = recipe.history or DelayedScaling(fp8_format=recipe.fp8_format)
        fp8_max = {slot: attention_format(recipe, slot).max for slot in self.slots}
        self._scales = ModuleScales(timing, list(self.modules), fp8_max, self.NAME)
        for name, module in self.modules.items():
            module.slots = self._scales.slots(name)
        self.leave_on(model)
        self._scales.attach(model)

    @property
    def delayed(self) -> DelayedScalingState:
        """The scales and histories."""
        return self._scales.state

    def update(self) -> None:
        """Finish the running pass: a collective, so every rank calls it. Twice is as good as once."""
        self._scales.state.update()

    def header(self) -> dict[str, Any]:
        """As of any state, and the slots' names."""
        return {**super().header(), "slots": list(self.slots)}

    def state_dict(self) -> dict[str, Any]:
        """Loads with ``weights_only=True``.

        Returns:
            ``version``, ``recipe``, ``slots`` (their names), ``modules``: name -> ``scale`` ``[slots]`` and ``amax_history``
            ``[L, slots]``.
        """
        return {**self.header(), "modules": self._scales.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave.

        Raises:
            RuntimeError: The state is of another recipe, version or model, or damaged; nothing is changed then.
        """
        with readable(self.NAME):
            self.check_header(state)
            self._scales.load_state_dict(state["modules"])
