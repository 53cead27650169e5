"""Configuration errors that name the YAML key, the value, what is allowed and the nearest valid name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["ConfigError", "check_choice", "check_integer", "check_patterns", "from_mapping", "nearest"]

T = TypeVar("T")


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
