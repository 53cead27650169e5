"""The error of every bad configuration, and the record of settings that do not go together."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

__all__ = ["Clash", "ConfigError", "NoEffect", "first_line", "nearest", "refuse"]


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


@dataclasses.dataclass(frozen=True)
class Clash:
    """Two settings that do not go together, or one that is missing: what training raises from and ``doctor`` prints."""

    settings: str
    """The keys, as the page of limits names them."""
    text: str
    """What is wrong and what to do; ``{run.name}`` stands for what is asked."""
    when: Callable[[Any], bool]
    error: bool = True
    trainers: tuple[Literal["composer", "transformers", "torchtitan", "loop"], ...] = ("composer",)
    """Whose runs it is about; what one trainer calls a setting, another has another name for."""


def refuse(clashes: Iterable[Clash], run: object) -> None:
    """Raise the first error that ``run`` has as a :class:`ConfigError`."""
    for clash in clashes:
        if clash.error and clash.when(run):
            raise ConfigError(clash.text.format(run=run))
