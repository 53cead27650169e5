"""What a labelled run is: a small model, its data, a recipe, and what happens to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from mechanisms.base import Mechanism

Label = Literal["diverges", "diverges in both", "healthy"]
"""``diverges``: in FP8 and not in high precision. ``diverges in both``: the guard can do nothing about it."""


def delayed(history: int = 16, **options: Any) -> dict[str, Any]:
    """Delayed scaling with an amax history of so many steps."""
    return {"name": "delayed", "amax_history_len": history, **options}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One labelled run, the same in every variant but for the precision and the guard."""

    name: str
    label: Label
    about: str
    """What happens, in a few words; with its source where it is published."""
    recipe: dict[str, Any] | str = dataclasses.field(default_factory=delayed)
    attention: bool = False
    """Attention's GEMMs in FP8 too."""
    mechanism: Callable[[], Mechanism] = Mechanism
    """Makes what happens to the model; a fresh one for every run."""
    onset: int = 0
    """The step at which it begins. Alarms before it are false."""
    ends: int | None = None
    """The step from which the cause is gone, so that coming back to FP8 is right; ``None``: it stays."""
    blocks: tuple[int, ...] = ()
    """The blocks where the cause is; empty: all. Demoting what is in another one is false."""
    touched: str = "*"
    """Glob on the names of the modules that the cause affects; in the others FP8 is well, and promoting them is right."""
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of FogConfig; or with a ``kind`` of ``train.HOSTS``, of that model's configuration."""
    noise: Callable[[int], float] = lambda step: 0.1
    """Share of random tokens in the batch of a step."""
    lr: Callable[[int], float] = lambda step: 3e-3 * min(1.0, (step + 1) / 20)
    steps: int = 200
    rows: int = 8
    seed: int = 0
    clip: float | None = 1.0
    """Gradient clipping by norm."""

    @property
    def diverges(self) -> bool:
        return self.label != "healthy"
