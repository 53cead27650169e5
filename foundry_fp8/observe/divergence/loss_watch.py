"""Whether the loss has gone up, whether it climbs on, and whether it is back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from foundry_fp8.observe.divergence.resuming import taken
from foundry_fp8.observe.divergence.signals import RULES, Signal

__all__ = ["HORIZON", "LossWatch", "Rise"]

HORIZON = 64
"""Observations for which an alarm of the loss or a sign is remembered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rise:
    """An alarm of the loss.

    Attributes:
        threshold: What it would have had to exceed, twice in a row, to raise it by itself.
        climbs: It is the second one within :data:`HORIZON`, and there was a trend since the first; a loss that shifts and stays
            and shifts again has none.
    """

    threshold: float
    climbs: bool


class LossWatch:
    """The loss's past.

    Attributes:
        broken: Observations in a row whose loss was not finite.
        high: Looks in a row in which it was above where an alarm would be, or would have been before the last one.

    Source:
        Trend: Mann, "Nonparametric tests against trend", Econometrica 13 (1945), over the time in which Page's sums say that
        nothing has changed yet.
    """

    def __init__(self) -> None:
        self._signal = Signal(RULES["loss"])
        self.broken = 0
        self.high = 0
        self._age: int | None = None
        """Observations since the last alarm."""
        self._calm: float | None = None
        """What it had to exceed before the last alarm; ``None`` once it is below again."""
        self._since: list[float] = []
        """Logarithms since the last alarm."""
        self._settled = 0
        """How many of them were before the sums began to rise."""

    @property
    def limit(self) -> float:
        """Above this it is high."""
        return self._signal.threshold if self._calm is None else self._calm

    def quiet_for(self, observations: int) -> bool:
        """Whether it is finite and there was no alarm in so many observations."""
        return not self.broken and (self._age is None or self._age >= observations)

    def look(self, loss: float) -> None:
        """Out of turn: teaches nothing."""
        self.high = 0 if loss <= self.limit else self.high + 1

    def observe(self, loss: float) -> Rise | None:
        """Take one observation; what it is, if it raises the alarm."""
        self._age = None if self._age is None else self._age + 1
        recent = self._age is not None and self._age <= HORIZON
        threshold, broken = self._signal.threshold, not math.isfinite(loss)
        alarm = self._signal.observe(loss)
        self.broken = self.broken + 1 if broken else 0
        if self._calm is not None and (loss <= self._calm or not recent):
            self._calm = None
        if alarm and self._calm is None:
            self._calm = threshold
        self.look(loss)
        if self.broken > 2:  # it has been told
            return None
        if not alarm:
            if len(self._since) < HORIZON:
                self._since.append(math.log(loss) if loss > 0 else -math.inf)
                if not self._signal.test.evidence:
                    self._settled = len(self._since)
            return None
        climbs = recent and not broken and _climbs(self._since[: self._settled])
        self._age, self._since, self._settled = 0, [], 0
        return Rise(threshold=threshold, climbs=climbs)

    def state_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return {
            "signal": self._signal.state_dict(),
            "broken": self.broken,
            "high": self.high,
            "age": self._age,
            "calm": self._calm,
            "since": list(self._since),
            "settled": self._settled,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Take back what :meth:`state_dict` gave; the names that one of both lacks, which start anew."""
        state, differs = taken(saved, self.state_dict())
        differs += [f"signal/{name}" for name in self._signal.load_state_dict(state["signal"])]
        self.broken, self.high, self._age = state["broken"], state["high"], state["age"]
        self._calm, self._since, self._settled = state["calm"], list(state["since"]), state["settled"]
        return differs


def _climbs(series: Sequence[float]) -> bool:
    """Whether there is an upward trend, at 5 %; of fewer than four values one cannot say that there is none."""
    n = len(series)
    if n < 4:
        return True
    s = sum((b > a) - (b < a) for i, a in enumerate(series) for b in series[i + 1 :])
    return s - 1 > 1.645 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
