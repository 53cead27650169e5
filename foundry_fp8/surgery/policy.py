"""Which recipe each GEMM of a model runs: rules, of which the first that names a layer decides.

Everything that chooses is a rule. A single recipe is one that takes what ``include`` names, and ``exclude``,
``keep_first_blocks`` and ``keep_last_blocks`` are rules of high precision above it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.gemm_layer import Choice
from foundry_fp8.model_structure.block_numbers import parse_blocks
from foundry_fp8.model_structure.blocks import block_index_of, transformer_stacks
from foundry_fp8.model_structure.names import plain_name
from foundry_fp8.model_structure.roles import roles_of
from foundry_fp8.model_structure.selection import check_patterns_match, matches
from foundry_fp8.numerics.recipes import Recipe
from foundry_fp8.surgery.rules import HIGH_PRECISION, Rule
from foundry_fp8.surgery.timing import Clock, Moment, clocks

__all__ = ["Choice", "Policy"]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Rules in order.

    Attributes:
        rules: Each by the YAML key that says it.
        listed: The keys of a list's rules, each of which has to name a layer that no rule above names.
    """

    rules: Mapping[str, Rule]
    listed: frozenset[str] = frozenset()

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The FP8 recipes, each once."""
        named = (rule.recipe for rule in self.rules.values())
        return tuple(dict.fromkeys(recipe for recipe in named if isinstance(recipe, Recipe)))

    @property
    def globs(self) -> tuple[str, ...]:
        """The patterns of the rules of FP8 recipes."""
        fp8 = (rule for rule in self.rules.values() if rule.recipe != HIGH_PRECISION)
        return tuple(glob for rule in fp8 for glob in rule.globs)

    @property
    def moments(self) -> list[Moment]:
        """Where rules begin and end to hold; none where all hold all the time."""
        return [moment for rule in self.rules.values() for moment in rule.moments.values()]

    def held(self, clock: Clock, length: Moment | None = None) -> tuple[str, ...]:
        """The keys of the rules that hold, in a run of ``length``."""
        return tuple(key for key, rule in self.rules.items() if rule.holds(clock, length))

    def untimely(self, counted: Collection[str], length: Moment | None) -> str:
        """Why a run of ``length``, which counts these units, cannot follow the rules' times; empty if it can."""
        times, above = clocks(self.moments, length), list[Rule]()
        for key, rule in self.rules.items():
            for moment in rule.moments.values():
                if moment.within(length).unit not in counted:
                    needs = "a share (0.9dur) needs the run's length: max_duration in what can be counted, max_steps, FP8Run(steps=...)"
                    return f"{key}: {moment} is not known here ({', '.join(counted) or 'nothing'} is). Write steps (1000ba); {needs}"
            if not any(rule.holds(at, length) and not any(a.holds(at, length) for a in above if a.covers(rule)) for at in times):  # fmt: skip
                return f"{key}: no moment of the run reaches it. Remove it, or change from and until"
            above.append(rule)
        return ""

    def choice(self, key: str) -> Choice:
        """What the rule ``key`` says."""
        rule = self.rules[key]
        beside = {gemm: precision for gemm, precision in rule.gemms.items() if precision != "fp8"}
        reads_fp8 = len(beside) < 3 or "dequantized" in beside.values()
        recipe = rule.recipe if isinstance(rule.recipe, Recipe) and reads_fp8 else None
        return Choice(recipe, beside, key, rule.when)

    def kept_blocks(self, model: nn.Module) -> set[int]:
        """Indices of the blocks that rules without other conditions leave in high precision.

        Raises:
            ConfigError: They are all blocks of the model.
        """
        alone = Rule(recipe=HIGH_PRECISION)
        of_blocks = {key: rule for key, rule in self.rules.items() if rule.blocks is not None}
        rules = {k: r for k, r in of_blocks.items() if dataclasses.replace(r, blocks=None) == alone}
        kept = {index for key, rule in rules.items() for index in _blocks(model, rule, key)}
        count = sum(map(len, transformer_stacks(model)))
        if rules and len(kept) == count:
            said = " and ".join(f"{key} ({rule.blocks})" for key, rule in rules.items())
            raise ConfigError(
                f"{said} leave nothing of the model's {count} transformer blocks to convert. Name fewer, or name the layers."
            )
        return kept

    def resolve(self, model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Of ``names``, linears of ``model``, those that a rule names, each with the key of the first, or the first at some time.

        Raises:
            ConfigError: A glob matches nothing, or a rule of a list names nothing that no rule above it names.
        """
        names = list(dict.fromkeys(names))
        plain_names = [plain_name(name) for name in names]
        blocks = [block for stack in transformer_stacks(model) for block in stack]
        roles = roles_of(model, names) if any(rule.roles for rule in self.rules.values()) else {}
        self.kept_blocks(model)
        found: dict[str, tuple[str, ...]] = {}
        times = clocks(self.moments)

        def reached(name: str, rule: Rule) -> bool:
            above = [self.rules[key] for key in found.get(name, ())]
            return any(rule.holds(at) and not any(one.holds(at) for one in above) for at in times)

        for key, rule in self.rules.items():
            if rule.globs != ("*",):
                where = f"{key}.modules" if key in self.listed else key
                absent = [
                    glob for glob in rule.globs if not any(matches(plain, [glob]) for plain in plain_names)
                ]
                check_patterns_match(absent, names, where, "linear layers")
            chosen = None if rule.blocks is None else _blocks(model, rule, key)
            named = [
                name
                for name, plain in zip(names, plain_names, strict=True)
                if (not rule.globs or matches(name, rule.globs) or matches(plain, rule.globs))
                and (chosen is None or block_index_of(name, blocks) in chosen)
                and (not rule.roles or roles.get(name) in rule.roles)
            ]
            taken = [name for name in named if reached(name, rule)]
            if key in self.listed and not taken:
                above = " and ".join(sorted({key for name in named for key in found.get(name, ())}))
                has = f"{len(blocks)} transformer blocks and the roles {', '.join(sorted(set(roles_of(model, names).values())))}"
                said = (
                    f"rules above it name all of its layers: {above}"
                    if above
                    else f"no moment of a run is {rule.when}"
                    if named
                    else f"it names no linear layer; the model has {has}"
                )
                raise ConfigError(
                    f"{key}: no effect: {said}. Remove it, or change its conditions, all of which have to hold."
                )
            for name in taken:
                found[name] = (*found.get(name, ()), key)
        return found


def _blocks(model: nn.Module, rule: Rule, key: str) -> set[int]:
    chosen: set[int] = set()
    first = 0
    for stack in transformer_stacks(model):
        chosen |= {first + block for block in parse_blocks(rule.blocks, len(stack), f"{key}.blocks")}
        first += len(stack)
    return chosen
