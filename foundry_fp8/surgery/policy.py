"""Which recipe each GEMM of a model runs: rules, of which the first that names a layer decides.

Everything that chooses is a rule. A single recipe is one that takes what ``include`` names, and ``exclude``,
``keep_first_blocks`` and ``keep_last_blocks`` are rules of high precision above it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from torch import nn

from foundry_fp8.config import (
    Batches,
    Config,
    ConfigError,
    Names,
    Parse,
    Positive,
    PositiveNumber,
    Text,
    check_choice,
    from_mapping,
    one_of,
)
from foundry_fp8.model_structure.block_numbers import Blocks, parse_blocks
from foundry_fp8.model_structure.blocks import block_index_of, transformer_stacks
from foundry_fp8.model_structure.roles import Role, roles_of
from foundry_fp8.model_structure.selection import check_patterns_match, matches
from foundry_fp8.numerics.recipes import (
    FOR_ANY_MODEL,
    GEMMS,
    RECIPES,
    DelayedScaling,
    Gemm,
    Recipe,
    parse_recipe,
)

__all__ = ["HIGH_PRECISION", "Choice", "Measured", "Policy", "Rule", "Wgrad", "parse_rules"]

HIGH_PRECISION: Literal["high_precision"] = "high_precision"
Wgrad = Literal["fp8", "high_precision"]


def _recipe_of_rule(value: Any, key: str) -> Recipe | Literal["high_precision"]:
    if value == HIGH_PRECISION:
        return HIGH_PRECISION
    if value in ("auto", "measured"):
        raise ConfigError(
            f"{key}: {value} chooses for the whole model and is no rule's. Write recipe: {value}, or name a recipe here."
        )
    if isinstance(value, str):
        check_choice(key, value, (*RECIPES, HIGH_PRECISION))
    return parse_recipe(value, key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(Config):
    """One rule: the layers that all its conditions name (a condition that is not given names all), and what they run."""

    recipe: Annotated[Recipe | Literal["high_precision"], Parse(_recipe_of_rule, "a recipe")]
    """A recipe's name, a mapping with its fields, or ``high_precision``."""
    modules: Names | Text = ()
    """Globs on whole module names. One that names a layer takes it in where it would be left out by default."""
    blocks: Blocks | None = None
    """Transformer blocks, counted from 0 in an encoder and in a decoder each: ``first-2``, ``last-15%``, ``range-2-5``, ``[0, 7]``."""
    roles: Sequence[Role] = ()
    """``attention``, ``mlp``, ``expert``, ``shared_expert``: what the layers are part of."""
    gemms: Mapping[Gemm, Wgrad] = dataclasses.field(default_factory=dict)
    """``{wgrad: high_precision}`` computes the weight's gradient from operands that are not quantised."""

    @property
    def globs(self) -> tuple[str, ...]:
        """The patterns of ``modules``."""
        return (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)

    @property
    def blocks_alone(self) -> bool:
        """Whether it leaves whole blocks in high precision."""
        return (
            self.recipe == HIGH_PRECISION and self.blocks is not None and not self.modules and not self.roles
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Config):
    """``recipe: measured``, or a mapping with these fields: each block and role gets the fastest recipe that the gradients bear."""

    name: Literal["measured"] = "measured"
    error: PositiveNumber = 0.2
    """The relative error that all of FP8 together may make in the gradient of a transformer block."""
    warmup: Batches = 20
    """Batches in high precision before it is measured."""
    rows: Positive = 1
    """Sequences of a batch that each rank measures on."""
    recipes: Sequence[Annotated[str, one_of(*FOR_ANY_MODEL)]] = ()
    """To choose from; all that the backend runs if empty."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a layer runs."""

    recipe: Recipe
    wgrad: Wgrad = "fp8"

    @property
    def gemms(self) -> dict[str, str]:
        """The recipe's name, or ``high_precision``, by GEMM."""
        return {**dict.fromkeys(GEMMS, self.recipe.name), **({"wgrad": self.wgrad} if self.wgrad != "fp8" else {})}  # fmt: skip

    def __str__(self) -> str:
        return self.recipe.name + (", wgrad in high precision" if self.wgrad == HIGH_PRECISION else "")


def parse_rules(value: Sequence[Any], key: str) -> tuple[Rule, ...]:
    """The rules of a YAML's list.

    Raises:
        ConfigError: An empty list, an unknown key, recipe, role or GEMM, rules that contradict each other, or none of an FP8 recipe.
    """
    if not value:
        raise ConfigError(f"{key}: an empty list. Write rules, such as - {{recipe: current}}.")
    rules = tuple(
        item if isinstance(item, Rule) else from_mapping(Rule, item, f"{key}[{i}]", "A rule")
        for i, item in enumerate(value)
    )
    delayed: dict[Recipe, int] = {}
    for i, rule in enumerate(rules):
        if rule.recipe == HIGH_PRECISION and rule.gemms:
            raise ConfigError(
                f"{key}[{i}].gemms: the rule's recipe is {HIGH_PRECISION} for every GEMM. Remove one of them."
            )
        for gemm in ("fprop", "dgrad"):
            if rule.gemms.get(gemm) == HIGH_PRECISION:  # type: ignore[call-overload]
                raise ConfigError(
                    f"{key}[{i}].gemms.{gemm}: {HIGH_PRECISION} is for wgrad alone; fprop and dgrad run the rule's recipe. "
                    f"Leave the layer in high precision (recipe: {HIGH_PRECISION}), or remove it."
                )
        if isinstance(rule.recipe, DelayedScaling):
            delayed.setdefault(rule.recipe, i)
    if all(rule.recipe == HIGH_PRECISION for rule in rules):
        raise ConfigError(
            f"{key}: every rule is {HIGH_PRECISION}, so nothing would run FP8. To switch it off, set enabled: false."
        )
    if len(delayed) > 1:
        first, second = [*delayed.values()][:2]
        raise ConfigError(
            f"{key}[{second}].recipe: delayed with other fields than in {key}[{first}]; a model has one delayed recipe."
        )
    return rules


@dataclasses.dataclass(frozen=True)
class Policy:
    """Rules in order, each with the YAML key that says it.

    Attributes:
        rules: ``(key, rule)``.
        listed: The keys of a list's rules, each of which has to name a layer that no rule above names.
    """

    rules: Sequence[tuple[str, Rule]]
    listed: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        recipe: Recipe | Sequence[Rule],
        key: str,
        *,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        keep_first_blocks: int = 0,
        keep_last_blocks: int = 0,
        wgrad: Wgrad = "fp8",
    ) -> Policy:
        """The rules that the options of ``key`` are short for."""
        high = HIGH_PRECISION
        rules = [(f"{key}.exclude", Rule(recipe=high, modules=exclude))] if exclude else []
        for side, count in (("first", keep_first_blocks), ("last", keep_last_blocks)):
            if count:
                rules.append((f"{key}.keep_{side}_blocks", Rule(recipe=high, blocks=f"{side}-{count}")))
        if isinstance(recipe, Recipe):
            base = Rule(recipe=recipe, modules=include, gemms={"wgrad": wgrad})
            return cls([*rules, (f"{key}.{'recipe' if tuple(include) == ('*',) else 'include'}", base)])
        own = [
            (f"{key}.recipe[{i}]", rule if rule.recipe == high else dataclasses.replace(rule, gemms={"wgrad": wgrad, **rule.gemms}))
            for i, rule in enumerate(recipe)
        ]  # fmt: skip
        return cls([*rules, *own], frozenset(where for where, _ in own))

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The FP8 recipes, each once."""
        return tuple(dict.fromkeys(rule.recipe for _, rule in self.rules if isinstance(rule.recipe, Recipe)))

    @property
    def globs(self) -> tuple[str, ...]:
        """The patterns of the rules of FP8 recipes."""
        return tuple(glob for _, rule in self.rules if rule.recipe != HIGH_PRECISION for glob in rule.globs)

    def choice(self, key: str) -> Choice | None:
        """What the rule ``key`` says; ``None`` is high precision."""
        rule = dict(self.rules)[key]
        return (
            Choice(rule.recipe, rule.gemms.get("wgrad", "fp8")) if isinstance(rule.recipe, Recipe) else None
        )

    def kept_blocks(self, model: nn.Module) -> set[int]:
        """Indices of the blocks that rules without other conditions leave in high precision.

        Raises:
            ConfigError: They are all blocks of the model.
        """
        rules = [(key, rule) for key, rule in self.rules if rule.blocks_alone]
        kept = {index for key, rule in rules for index in _blocks(model, rule, key)}
        count = sum(map(len, transformer_stacks(model)))
        if rules and len(kept) == count:
            said = " and ".join(f"{key} ({rule.blocks})" for key, rule in rules)
            raise ConfigError(
                f"{said} leave nothing of the model's {count} transformer blocks to convert. Name fewer, or name the layers."
            )
        return kept

    def resolve(self, model: nn.Module, names: Iterable[str]) -> dict[str, str]:
        """Of ``names``, linears of ``model``, those that a rule names, each with the key of the first.

        Raises:
            ConfigError: A glob matches nothing, or a rule of a list names nothing that no rule above it names.
        """
        names = list(dict.fromkeys(names))
        blocks = [block for stack in transformer_stacks(model) for block in stack]
        roles = roles_of(model, names) if any(rule.roles for _, rule in self.rules) else {}
        self.kept_blocks(model)
        found: dict[str, str] = {}
        for key, rule in self.rules:
            if rule.globs != ("*",):
                where = f"{key}.modules" if key in self.listed else key
                check_patterns_match(rule.globs, names, where, "linear layers")
            chosen = None if rule.blocks is None else _blocks(model, rule, key)
            named = [
                name
                for name in names
                if (not rule.globs or matches(name, rule.globs))
                and (chosen is None or block_index_of(name, blocks) in chosen)
                and (not rule.roles or roles.get(name) in rule.roles)
            ]
            if key in self.listed and all(name in found for name in named):
                raise ConfigError(_without_effect(key, rule, sorted({found[n] for n in named}), len(blocks), roles))  # fmt: skip
            for name in named:
                found.setdefault(name, key)
        return found


def _blocks(model: nn.Module, rule: Rule, key: str) -> set[int]:
    chosen: set[int] = set()
    first = 0
    for stack in transformer_stacks(model):
        chosen |= {first + block for block in parse_blocks(rule.blocks, len(stack), f"{key}.blocks")}
        first += len(stack)
    return chosen


def _without_effect(
    key: str, rule: Rule, above: Sequence[str], blocks: int, roles: Mapping[str, Role]
) -> str:
    if above:
        return f"{key}: it has no effect: every layer that it names is named by {' and '.join(above)} above it. Remove it, or move it up."
    there = [f"{blocks} transformer blocks"]
    if rule.roles:
        there.append(f"layers of the roles {', '.join(sorted(set(roles.values()))) or '(none)'}")
    return f"{key}: it names no linear layer. The model has {' and '.join(there)}; all conditions of a rule hold together."
