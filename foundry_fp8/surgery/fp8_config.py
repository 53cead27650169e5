"""The options of ``algorithms.fp8``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch

from foundry_fp8.backends import BACKENDS, BackendOptions
from foundry_fp8.config import (
    Config,
    ConfigError,
    Names,
    Natural,
    Parse,
    accept,
    check_choice,
    from_mapping,
    not_empty,
    one_of,
)
from foundry_fp8.layers.attention import GradScores, no_attention_form
from foundry_fp8.numerics.recipes import RECIPES, DelayedScaling, Gemm, Recipe, parse_recipe
from foundry_fp8.surgery.policy import Policy
from foundry_fp8.surgery.rules import HIGH_PRECISION, Measured, Rule, Wgrad, parse_rules

__all__ = ["KEY", "TE_LAYERS", "AttentionConfig", "FP8Config", "resolve_recipe"]

KEY = "algorithms.fp8"
TE_LAYERS = (
    f"{KEY}: the model holds Transformer Engine modules, so FP8 would be set up twice. Remove `fc_type: te` and `ffn_type: te_ln_mlp` from "
    "the model's config; this algorithm converts plain linears."
)


def _recipe(value: Any, key: str) -> Recipe | Sequence[Rule] | Measured | Literal["auto"]:
    if isinstance(value, Measured):
        return value
    if isinstance(value, str) and value not in RECIPES:
        check_choice(key, value, (*RECIPES, "auto", "measured"))
        return "auto" if value == "auto" else Measured()
    if isinstance(value, Mapping) and value.get("name") == "measured":
        return from_mapping(Measured, value, key, "Recipe measured")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return parse_rules(value, key)
    return parse_recipe(value, key)


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
    """The mapping under ``algorithms.fp8.attention``; ``true`` stands for the defaults."""

    key = f"{KEY}.attention"

    recipe: Annotated[Recipe | None, Parse(_recipe_or_that_of_the_linears, "delayed, current or null")] = None
    """``delayed`` or ``current``, or a mapping with the recipe's own fields; ``null``: that of the linears."""
    grad_scores: GradScores = "fp8"
    """What the gradient of the logits is rounded to before the products that make dQ and dK: ``fp8`` is the gradients' format, E5M2;
    ``bfloat16`` is the emulated backend's alone: cuDNN's kernel rounds it to FP8."""
    exclude: Names = ()
    """Globs on the names of attention modules to leave in high precision."""


def _attention(value: Any, key: str) -> AttentionConfig | Literal[False]:
    """``true``, ``false``, or a mapping with the fields of :class:`AttentionConfig`.

    Raises:
        ConfigError: Anything else.
    """
    if isinstance(value, AttentionConfig):
        return value
    if isinstance(value, bool) or not hasattr(value, "keys"):
        return AttentionConfig() if accept(bool, value, key) else False
    return from_mapping(AttentionConfig, value, key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8Config(Config):
    """The YAML under ``algorithms.fp8``."""

    key = KEY

    recipe: Annotated[
        Recipe | Sequence[Rule] | Measured | Literal["auto"], Parse(_recipe, "a recipe or a list of rules")
    ] = "auto"
    """``delayed``, ``current``, ``block``, ``mxfp8``, ``nvfp4``, ``unit`` (for µnit-scaled models), or a mapping with the recipe's own fields (``{name: delayed,
    margin: 1}``). ``auto``: mxfp8 on GPUs of compute capability 10.x, else current; layers that the backend predicts to be no faster in FP8
    stay in high precision. A list of rules (docs/policy.md), of which the first that names a layer decides:
    ``[{blocks: last-2, recipe: high_precision}, {roles: [mlp], recipe: current}]``. ``measured`` (``{name: measured, error: 0.2}``): each layer's
    recipe by the error of the gradients; before that measurement a run is in high precision, and a plain module in delayed."""
    backend: Annotated[str, one_of("auto", *BACKENDS)] = "auto"
    """``transformer_engine``, ``native``, ``emulated``, or ``auto``: on a GPU native if it can run the recipe, else
    Transformer Engine; on a CPU emulated."""
    accumulation: Literal["float32", "hopper"] = "float32"
    """How the emulated backend adds products up: in float32, or bit for bit as Hopper's tensor cores do under the recipe's
    ``fast_accumulation`` (slow; not for mxfp8 and nvfp4)."""
    include: Annotated[Names, not_empty] = ("*",)
    """Globs on module names to convert. A layer that is left out by default is converted if a glob names it (``*.gate``, not ``*``)."""
    exclude: Names = ()
    """Globs on module names to leave in high precision. Output heads, routers, adapters (LoRA) and embeddings are left out
    by default."""
    keep_first_blocks: Natural = 0
    """How many of the first transformer blocks stay in high precision; in an encoder-decoder, of each of the two."""
    keep_last_blocks: Natural = 0
    """The same for the last blocks."""
    wgrad: Literal["fp8", "high_precision"] = "fp8"
    """The precision of the weight gradient's GEMM."""
    evaluate: Literal["fp8", "high_precision"] = "high_precision"
    """The precision of evaluation."""
    fuse: bool | Literal["auto"] = "auto"
    """Compute norms and whole MLPs in the kernels of the linears behind them, where their arithmetic is known: on the native backend
    (docs/kernels.md). ``true`` is an error on others."""
    cache_weights: bool | Literal["auto"] = "auto"
    """``auto`` keeps what a forward makes of a weight for its backward, one byte an element, on devices with that much memory to spare.
    ``true`` quantises each weight once per optimizer step instead of in every microbatch. Costs two bytes of memory a weight element,
    under FSDP2 of the whole unsharded model. Native only; ``true`` not under FSDP1."""
    frozen_weights: Literal["high_precision", "fp8"] = "high_precision"
    """``fp8`` stores the weights of converted linears that do not train (the base model's under LoRA) only in FP8, one byte an element, as the recipe
    quantises them. FP8 layers give the same results; what reads the weight in high precision (evaluation, merged adapters, checkpoints) gets it
    rounded. Not under FSDP or through Transformer Engine; the recipe's scales must be powers of two."""
    attention: Annotated[AttentionConfig | Literal[False], Parse(_attention, "true, false or a mapping")] = (
        False
    )
    """Whether attention's GEMMs run in FP8 too (FP8DPA), with the delayed or the current recipe (through Transformer Engine the delayed one alone):
    ``true``, or a mapping with ``recipe``, ``grad_scores`` and ``exclude``."""
    enabled: bool = True
    """``false`` converts nothing: the same YAML then trains in high precision, for comparison."""
    announce: bool = True
    """Whether a run prints at its start what was converted, whatever the logging level. ``apply_fp8`` itself prints nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.recipe, Measured) and self.attention:
            raise ConfigError(
                f"{KEY}.attention: recipe: measured chooses for linears alone. Set it to false."
            )
        if not isinstance(self.recipe, Recipe | Measured | str) and tuple(self.include) != ("*",):
            raise ConfigError(f"{KEY}.include: the rules of {KEY}.recipe name what they convert. Remove it.")
        of_run = "attention", "frozen_weights"
        whole = [name for name in of_run if getattr(self, name) not in (False, "high_precision")]
        if whole and self.policy(torch.device("cpu")).moments:
            raise ConfigError(
                f"{KEY}.{whole[0]}: it is for the whole run; rules have from or until. Remove one."
            )

    @property
    def gemms(self) -> str | Literal[False]:
        """The key of a rule with a GEMM beside FP8, other than wgrad in high precision."""
        rules = self.policy(torch.device("cpu")).rules
        plain = {"wgrad": HIGH_PRECISION}.items()
        beside = {key: dict(rule.gemms.items() - plain).values() for key, rule in rules.items()}
        return next((key for key, how in beside.items() if {*how} - {"fp8"}), False)

    @property
    def runs_unit(self) -> bool:
        """Whether a rule's recipe is ``unit``: its constant scales leave no room for a scaled loss, and it waits for the first batch."""
        return any(not recipe.for_any_model for recipe in self.policy(torch.device("cpu")).recipes)

    @property
    def of_backend(self) -> BackendOptions:
        """What is asked of the backend beside recipes."""
        measured = self.recipe == "auto" or isinstance(self.recipe, Measured)
        return BackendOptions(measured, self.accumulation, self.cache_weights)

    def policy(self, device: torch.device) -> Policy:
        """``recipe``, ``include``, ``exclude``, ``keep_*_blocks`` and ``wgrad`` as one list of rules, for ``device``."""
        rules = {f"{KEY}.exclude": Rule(recipe=HIGH_PRECISION, modules=self.exclude)} if self.exclude else {}
        for side, count in (("first", self.keep_first_blocks), ("last", self.keep_last_blocks)):
            if count:
                rules[f"{KEY}.keep_{side}_blocks"] = Rule(recipe=HIGH_PRECISION, blocks=f"{side}-{count}")
        recipe = DelayedScaling() if isinstance(self.recipe, Measured) else self.recipe
        wgrad: dict[Gemm, Wgrad] = {"wgrad": self.wgrad}
        if isinstance(recipe, Recipe | str):
            name = "recipe" if tuple(self.include) == ("*",) else "include"
            base = Rule(recipe=resolve_recipe(recipe, device), modules=self.include, gemms=wgrad)
            return Policy({**rules, f"{KEY}.{name}": base})
        listed = {f"{KEY}.recipe[{i}]": rule for i, rule in enumerate(recipe)}
        for key, rule in listed.items():
            if rule.recipe != HIGH_PRECISION:
                listed[key] = dataclasses.replace(rule, gemms={**wgrad, **rule.gemms})
        return Policy({**rules, **listed}, frozenset(listed))


def resolve_recipe(recipe: str | Mapping[str, Any] | Recipe, device: torch.device) -> Recipe:
    """``recipe`` as an object; ``auto`` becomes mxfp8 on compute capability 10.x, else current."""
    if recipe != "auto":
        return parse_recipe(recipe, f"{KEY}.recipe")
    blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
    return RECIPES["mxfp8" if blackwell else "current"]()
