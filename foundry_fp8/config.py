"""Configuration errors that name the YAML key, the value, what is allowed and the nearest valid name."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

__all__ = [
    "ConfigError",
    "check_choice",
    "check_integer",
    "check_patterns",
    "format_bytes",
    "from_mapping",
    "nearest",
    "parse_bytes",
]

T = TypeVar("T")

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class ConfigError(ValueError):
    """A configuration that cannot be run, found before training starts."""


def nearest(name: object, allowed: Collection[str]) -> str:
    """``" Did you mean 'x'?"`` for the closest of ``allowed``, or an empty string."""
    found = difflib.get_close_matches(str(name), list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {found[0]!r}?" if found else ""


def check_choice(key: str, value: object, allowed: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``allowed``.

    Args:
        key: The YAML key, dotted (``algorithms.fp8.backend``).
        value: What the user gave.
        allowed: Every valid value, in the order to print.

    Raises:
        ConfigError: Names the key, the value, the valid values and the nearest one.
    """
    if value not in allowed:
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(allowed)}.{nearest(value, allowed)}")


def check_integer(key: str, value: object, *, minimum: int = 0) -> None:
    """Raise :class:`ConfigError` unless ``value`` is an int of at least ``minimum`` (a bool is not an int here)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{key}: {value!r} is not an integer of at least {minimum}.")


def check_patterns(key: str, value: object) -> tuple[str, ...]:
    """Return ``value`` as a tuple of fnmatch patterns; raise :class:`ConfigError` if it is not a list of strings."""
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not all(isinstance(p, str) for p in value)
    ):
        raise ConfigError(
            f'{key}: {value!r} is not a list of module-name patterns. Write a list, such as ["*.ffn.*"].'
        )
    return tuple(value)


def from_mapping(cls: type[T], values: Mapping[str, Any], key: str) -> T:
    """Build the dataclass ``cls`` from a YAML mapping.

    Args:
        cls: A dataclass that checks its own values in ``__post_init__``.
        values: The mapping as the YAML has it.
        key: The YAML key under which it stands, for messages.

    Raises:
        ConfigError: A key that ``cls`` does not have.
    """
    allowed = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    for name in values:
        if name not in allowed:
            raise ConfigError(
                f"{key}.{name}: unknown key. {key} takes {', '.join(allowed)}.{nearest(name, allowed)}"
            )
    return cls(**values)


def parse_bytes(value: object, key: str) -> int:
    """``"20GiB"``, ``"64kib"`` or ``65536`` in bytes.

    Raises:
        ConfigError: Neither a number of bytes nor a number with one of B, KiB, MiB, GiB, KB, MB, GB (in any case).
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = (
        re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", value) if isinstance(value, str) else None
    )
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ConfigError(
            f"{key}: {value!r} is not a size. Write a number of bytes, or a number and one of {', '.join(_UNITS)} (64KiB)."
        )
    return int(float(match[1]) * units[match[2].lower()])


def format_bytes(count: float) -> str:
    """``count`` bytes with a unit a person reads."""
    for unit in ("GiB", "MiB", "KiB"):
        if abs(count) >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.2f} {unit}"
    return f"{count:.0f} B"
