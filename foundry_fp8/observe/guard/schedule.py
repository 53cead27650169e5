"""When to measure, and when measurements make an alarm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

__all__ = ["Schedule"]

WINDOW = 3
"""Measurements of which two above a limit make an alarm: one bad batch makes none, a cause in every other batch does."""
AT_ONCE = 2.5
"""Times a limit from which one measurement makes an alarm: the error is then as large as the gradient itself."""
LOSSES = 20
"""Losses that the next one is compared with."""
JUMP = 4.0
"""Standard deviations above their mean from which a loss is a reason to measure. It decides nothing else."""


class Schedule:
    """Which batches are measured (each ``interval`` batches and where something is asked for), and which measurements make an alarm."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._asked = 0  # next batches to measure
        self._bad: list[bool] = []
        self._losses: list[float] = []

    def in_turn(self, batch: int) -> bool:
        """Whether batch ``batch`` (from 0) is measured whatever happens; the first is not, as scales are not known yet."""
        return batch > 0 and batch % self.interval == 0

    def due(self, batch: int) -> bool:
        """Whether it is measured."""
        return self.in_turn(batch) or (batch > 0 and self._asked > 0)

    def alarm(self, severity: float) -> bool:
        """Note a measurement; whether it makes an alarm. ``severity``: the error as a share of its limit."""
        bad = severity >= 1
        self._bad = [*self._bad, bad][-WINDOW:]
        self._asked = WINDOW - 1 if bad else max(0, self._asked - 1)
        if severity < AT_ONCE and sum(self._bad) < 2:
            return False
        self._bad = []
        return True

    def see_loss(self, loss: float) -> None:
        """The loss of a finished batch, the same on every rank."""
        known = self._losses
        if len(known) == LOSSES and not loss <= statistics.fmean(known) + JUMP * statistics.pstdev(known):
            self._asked = max(self._asked, 1)
        if math.isfinite(loss):
            self._losses = [*known, loss][-LOSSES:]

    def state_dict(self) -> dict[str, Any]:
        """Numbers and lists."""
        return {"asked": self._asked, "bad": list(self._bad), "losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave."""
        self._asked, self._bad, self._losses = state["asked"], list(state["bad"]), list(state["losses"])
