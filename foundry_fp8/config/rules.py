"""What an annotation may say beside its type: conditions, parsers, and the types that many fields have."""

from __future__ import annotations

import dataclasses
import math
import re
import string
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from foundry_fp8.config.errors import ConfigError

__all__ = [
    "Batches", "Bytes", "Fraction", "Names", "Natural", "Parse", "Positive", "PositiveNumber", "Rule", "Text", "above",
    "at_least", "at_most", "below", "format_bytes", "not_empty", "one_of", "parse_bytes", "power_of_two", "printable",
    "template",
]  # fmt: skip

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition on a value whose type is right already."""

    words: str
    """What follows the type in a message: ``of at least 1``."""
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    """Valid words, for the nearest one."""


@dataclasses.dataclass(frozen=True)
class Parse:
    """A function in place of the check: for what a YAML writes in several ways."""

    function: Callable[[Any, str], Any]
    """``function(value, key)`` returns what the field holds; what it has returned before passes through it unchanged."""
    words: str
    """What is allowed, for messages about a union: ``a size (64KiB)``."""


def at_least(minimum: float) -> Rule:
    """``value >= minimum``."""
    return Rule(f"of at least {minimum}", lambda value: value >= minimum)


def at_most(maximum: float) -> Rule:
    """``value <= maximum``."""
    return Rule(f"at most {maximum}", lambda value: value <= maximum)


def above(bound: float) -> Rule:
    """``value > bound``."""
    return Rule(f"above {bound}", lambda value: value > bound)


def below(bound: float) -> Rule:
    """``value < bound``."""
    return Rule(f"below {bound}", lambda value: value < bound)


def power_of_two(low: int, high: int) -> Rule:
    """1, 2, 4, ... between two of them."""
    return Rule(
        f"that is a power of two from {low} to {high}", lambda n: low <= n <= high and not n & (n - 1)
    )


def template(*fields: str) -> Rule:
    """Text in which the names of ``fields`` may stand in braces."""

    def holds(value: str) -> bool:
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(value) if name is not None]
        except ValueError:  # a brace without its other half
            return False
        return set(names) <= set(fields)

    return Rule(f"with nothing in braces but {', '.join(f'{{{field}}}' for field in fields)}", holds)


def one_of(*choices: str) -> Rule:
    """One of some words that are only known when the module is loaded; ``Literal`` where they can be written out."""
    return Rule(f"one of {', '.join(choices)}", lambda value: value in choices, choices)


not_empty = Rule("that is not empty", lambda value: len(value) > 0)
printable = Rule("of printable characters", lambda value: bool(value) and value.isprintable())


def parse_bytes(value: object, key: str) -> int:
    """``"20GiB"``, ``"64kib"`` or ``65536`` in bytes.

    Raises:
        ConfigError: Neither a number of bytes nor a number with one of B, KiB, MiB, GiB, KB, MB, GB (in any case).
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = (
        re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    )
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    size = float(match[1]) * units.get((match[2] or "B").lower(), math.inf) if match else math.inf
    if not math.isfinite(size):
        raise ConfigError(
            f"{key}: {value!r} is not a size. Write a number of bytes, or a number and one of {', '.join(_UNITS)} (64KiB)."
        )
    return int(size)


def format_bytes(count: float) -> str:
    """``count`` bytes with a unit a person reads."""
    for unit in ("GiB", "MiB", "KiB"):
        if abs(count) >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.2f} {unit}"
    return f"{count:.0f} B"


def _parse_batches(value: object, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = re.fullmatch(r"([0-9]{1,18})ba", value) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f"{key}: {value!r} is not a number of batches. Write it like 100ba.")
    return int(found[1])


Natural = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
PositiveNumber = Annotated[float, above(0)]
Fraction = Annotated[float, above(0), at_most(1)]
Text = Annotated[str, printable]
Names = Sequence[Text]
"""A list of strings: patterns, names."""
Batches = Annotated[int, Parse(_parse_batches, "a number of batches (100ba)")]
Bytes = Annotated[int, Parse(parse_bytes, "a size (64KiB)")]
