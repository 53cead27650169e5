"""How long training steps take: one clock for the run log and for MFU, so that both leave out the same."""

from __future__ import annotations

import time

__all__ = ["StepClock"]


class StepClock:
    """Seconds between asking for a batch and the end of that batch, added up.

    Saving a checkpoint and evaluating lie between the end of one batch and asking for the next, so neither counts. Composer's
    own ``total_wct`` leaves out evaluation alone.

    Attributes:
        seconds: Of all steps so far.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._began: float | None = None

    def begin(self) -> None:
        """A batch is asked for (``Event.BEFORE_DATALOADER``)."""
        self._began = time.perf_counter()

    def end(self) -> float:
        """The batch is done (``Event.BATCH_END``); returns the seconds that it took."""
        took = 0.0 if self._began is None else time.perf_counter() - self._began
        self._began = None
        self.seconds += took
        return took
