"""The rules of ``recipe`` in a YAML: which layers, and what they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

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
from foundry_fp8.model_structure.block_numbers import Blocks
from foundry_fp8.model_structure.roles import Role
from foundry_fp8.numerics.recipes import FOR_ANY_MODEL, RECIPES, Gemm, GemmPrecision, Recipe, parse_recipe
from foundry_fp8.surgery.timing import Clock, Moment, parse_moment

__all__ = ["HIGH_PRECISION", "Measured", "Rule", "Wgrad", "parse_rules"]

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
    gemms: Mapping[Gemm, GemmPrecision] = dataclasses.field(default_factory=dict)
    """``{fprop: high_precision}`` computes that GEMM, or dgrad or wgrad, from operands that are not quantised; ``dequantized`` multiplies
    the quantised ones in the compute dtype, which each is rounded to."""
    from_: Annotated[Moment | None, Parse(parse_moment, "a time")] = None
    """In a YAML ``from``: the rule holds from then on (``100ba``, ``20Btok``, ``0.9dur``, or an integer of steps)."""
    until: Annotated[Moment | None, Parse(parse_moment, "a time")] = None
    """The rule holds until then."""

    @property
    def globs(self) -> tuple[str, ...]:
        """The patterns of ``modules``."""
        return (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)

    @property
    def moments(self) -> dict[str, Moment]:
        """``from`` and ``until``, where it has them."""
        return {word: moment for word, moment in (("from", self.from_), ("until", self.until)) if moment}

    @property
    def when(self) -> str:
        """``from 100ba until 0.9dur``; empty where it holds all the time."""
        return " ".join(f"{word} {moment}" for word, moment in self.moments.items())

    def holds(self, clock: Clock, length: Moment | None = None) -> bool:
        """Whether it does at that time of a run of ``length``; ``KeyError`` for a unit that ``clock`` does not have."""
        there = {word: moment.within(length) for word, moment in self.moments.items()}
        passed = {word: clock[moment.unit] >= moment.value for word, moment in there.items()}
        return passed.get("from", True) and not passed.get("until", False)

    def covers(self, other: Rule) -> bool:
        """Whether it names every layer that ``other`` names, in whatever model."""
        mine, theirs = ((one.globs, one.blocks, one.roles) for one in (self, other))
        return mine in (((), None, ()), theirs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Config):
    """``recipe: measured``, or a mapping with these fields: each block and role gets the fastest recipe whose gradient error is below ``error``."""

    name: Literal["measured"] = "measured"
    error: PositiveNumber = 0.2
    """The relative error that all of FP8 together may make in the gradient of a transformer block."""
    warmup: Batches = 20
    """Batches in high precision before it is measured."""
    rows: Positive = 1
    """Sequences of a batch that each rank measures on."""
    recipes: Sequence[Annotated[str, one_of(*FOR_ANY_MODEL)]] = ()
    """To choose from; all that the backend runs if empty."""


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
    for i, rule in enumerate(rules):
        if rule.recipe == HIGH_PRECISION and rule.gemms:
            raise ConfigError(
                f"{key}[{i}].gemms: the rule's recipe is {HIGH_PRECISION} for every GEMM. Remove one of them."
            )
        start, end = rule.from_, rule.until
        units = {moment.unit for moment in rule.moments.values()} - {"dur"}
        if start and end and (len(units) > 1 or (start.unit == end.unit and start.value >= end.value)):
            why = "are not comparable" if len(units) > 1 else "are no time at all"
            raise ConfigError(f"{key}[{i}]: {rule.when} {why}. Write both in one unit, until after from.")
    if all(rule.recipe == HIGH_PRECISION for rule in rules):
        raise ConfigError(
            f"{key}: every rule is {HIGH_PRECISION}, so nothing would run FP8. To switch it off, set enabled: false."
        )
    named = {rule.recipe for rule in rules if isinstance(rule.recipe, Recipe)}
    if sum(recipe.uses_history for recipe in named) > 1:
        raise ConfigError(
            f"{key}: delayed with other fields in another rule; a model has one delayed recipe."
        )
    return rules
