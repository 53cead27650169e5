"""One watched number: its robust running statistics, and when it raises the alarm.

A value is compared with the median of its own recent past, in logarithms, because everything that is watched grows by
factors: with ``m`` the median and ``s`` 1.4826 times the median absolute deviation of ``log max(v, floor)`` over the
last observations that raised nothing, a value is *above* if

    log v > m + max(log ratio, sigmas * s)

``patience`` observations above in a row raise the alarm; a value that is not finite does at once. Values above never
enter the statistics, so that a slow climb cannot become its own yardstick once it has been noticed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["RULES", "Rule", "Signal"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """When a kind of signal is above, and when an alarm is repeated."""

    floor: float
    """Smaller values count as this one: below it, differences mean nothing."""
    ratio: float
    """At least this many times the median."""
    sigmas: float = 8.0
    """And at least this many robust standard deviations above it."""
    repeat: Literal["higher", "lasting"]
    """``higher``: a state of the tensor, which demoting a layer does not cure: alarm again only at ``ratio`` times the last
    alarm. ``lasting``: a damage that the right action ends: alarm again while it goes on."""


RULES: dict[str, Rule] = {
    "kurtosis": Rule(floor=5.0, ratio=4.0, repeat="higher"),
    "saturated": Rule(floor=2e-5, ratio=10.0, repeat="lasting"),
    "flushed": Rule(floor=5e-3, ratio=4.0, repeat="lasting"),
    "gradient_norm": Rule(floor=1e-12, ratio=10.0, repeat="lasting"),
    "loss": Rule(floor=1e-3, ratio=1.25, repeat="lasting"),
}
"""Layer by layer but for the loss. Chosen on the runs of ``benchmarks/divergence.py``, not on any published threshold."""


class Signal:
    """The running statistics of one number.

    Args:
        rule: When it is above.
        window: Observations that the statistics hold.
        warmup: Observations before the first alarm.
        patience: Observations above, in a row, that make an alarm.
    """

    def __init__(self, rule: Rule, *, window: int, warmup: int, patience: int) -> None:
        self.rule = rule
        self.warmup = warmup
        self.patience = patience
        self.past: deque[float] = deque(maxlen=window)
        self.streak = 0
        self.alarm_level: float | None = None
        """The value at the last alarm, until the signal has come back."""

    @property
    def threshold(self) -> float:
        """What a value must exceed; Inf during the warm-up."""
        if len(self.past) < self.warmup:
            return math.inf
        middle = statistics.median(self.past)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in self.past)
        return math.exp(middle + max(math.log(self.rule.ratio), self.rule.sigmas * spread))

    def observe(self, value: float) -> bool:
        """Take one observation; true if it raises the alarm."""
        finite = math.isfinite(value)
        if finite and value <= self.threshold:
            self.past.append(math.log(max(value, self.rule.floor)))
            self.streak, self.alarm_level = 0, None
            return False
        self.streak += 1
        if self.streak < self.patience and finite:
            return False
        higher = self.rule.repeat == "higher"
        if higher and self.alarm_level is not None and not value > self.alarm_level * self.rule.ratio:
            return False
        self.alarm_level = value if finite else math.inf
        self.streak = self.patience - 1 if higher else 0
        return True

    @property
    def calm(self) -> bool:
        """The last observation was not above."""
        return self.streak == 0 and self.alarm_level is None

    def state_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return {"past": list(self.past), "streak": self.streak, "alarm_level": self.alarm_level}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.past.clear()
        self.past.extend(state["past"])
        self.streak, self.alarm_level = state["streak"], state["alarm_level"]
