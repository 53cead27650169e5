"""Settings that do not go together: one record for the tables that training raises from and ``doctor`` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

from foundry_fp8.config.errors import ConfigError

__all__ = ["Clash", "refuse"]


@dataclasses.dataclass(frozen=True)
class Clash:
    """Two settings that do not go together, or one that is missing."""

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
