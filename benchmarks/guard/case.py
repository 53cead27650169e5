"""What a labelled run is: a small model, its data, a recipe, and the mechanism that makes it sick, or only noisy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from mechanisms.base import Mechanism

Label = Literal["diverges", "diverges in both", "healthy"]
"""``diverges``: in FP8 and not in high precision. ``diverges in both``: the guard can only say so."""

DELAYED = {"name": "delayed", "amax_history_len": 16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One labelled run, the same in every variant but for the precision and the guard."""

    name: str
    label: Label
    about: str
    """What happens, in a few words; with its source where it is published."""
    recipe: dict[str, Any] | str = dataclasses.field(default_factory=lambda: DELAYED)
    attention: bool = False
    """Attention's GEMMs in FP8 too."""
    mechanism: Callable[[], Mechanism] = Mechanism
    """Makes what happens to the model; a fresh one for every run."""
    onset: int = 0
    """The step at which it begins. Alarms before it are false."""
    ends: int | None = None
    """The step from which the cause is gone, so that coming back to FP8 is right; ``None``: it stays. What an amax
    history remembers ends with the history, which a guard may renew."""
    sick: tuple[int, ...] = ()
    """The blocks at fault; demoting what is in another one is false."""
    touched: str = "*"
    """Glob on the names of the modules that the cause touches; in the others FP8 is well, and promoting them is right."""
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
