"""The error of every bad configuration."""

from __future__ import annotations

import difflib
from collections.abc import Collection

__all__ = ["ConfigError", "NoEffect", "first_line", "nearest"]


class ConfigError(ValueError):
    """A configuration that cannot be run, found before training starts."""


class NoEffect(ConfigError):
    """A model that has nothing for an algorithm, whatever its options are."""


def nearest(name: object, allowed: Collection[str]) -> str:
    """``" Did you mean 'x'?"`` for the closest of ``allowed``, or an empty string."""
    found = difflib.get_close_matches(str(name), list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {found[0]!r}?" if found else ""


def first_line(error: Exception) -> str:
    """What ``error`` says, or its class where it says nothing: the first line, without the full stop."""
    return (str(error) or type(error).__name__).strip().splitlines()[0].rstrip(".")
