"""The Composer callback ``divergence_guard``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from composer.core import State
from composer.loggers import Logger

from foundry_fp8.callbacks.base import Monitor, model_of, training_loss
from foundry_fp8.callbacks.carried_state import CarriedState
from foundry_fp8.observe.guard.config import GuardConfig
from foundry_fp8.observe.guard.guard import DivergenceGuard as Guard

__all__ = ["DivergenceGuard", "DivergenceGuardConfig"]

COLUMNS = ("batch", "unit", "action", "signal", "detail")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergenceGuardConfig(GuardConfig):
    """The YAML under ``callbacks.divergence_guard``."""

    details: bool = False
    """Send the error of each block to every logger; otherwise the run log alone has it."""


class DivergenceGuardState(CarriedState):
    """The guard's state in the checkpoint."""


class DivergenceGuard(Monitor):
    """Runs :class:`~foundry_fp8.observe.guard.guard.DivergenceGuard` in a trainer.

    It measures on ``Event.AFTER_DATALOADER``, before other callbacks attach hooks to the model, and reads the loss on ``BATCH_END``.

    Args:
        **options: The fields of :class:`DivergenceGuardConfig`.
    """

    key = "divergence_guard"

    def __init__(self, **options: Any) -> None:
        super().__init__(DivergenceGuardConfig, options)
        self.guard: Guard | None = None  # from the start of training on
        self._loaded: dict[str, Any] = {}

    def init(self, state: State, logger: Logger) -> None:
        """Have the state saved."""
        state.algorithms.append(DivergenceGuardState(self))

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the layers, and set them to what a checkpoint says."""
        if self.guard is not None:  # a second fit() goes on where the first one stopped
            return
        self.guard = Guard(model_of(state), training_loss(state), **self.meter_options)
        if self._loaded:
            self.guard.load_state_dict(self._loaded)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Measure, act, and log it."""
        guard = self.guard
        if guard is None:
            return
        guard.batch = state.timestamp.batch.value
        if guard.due():  # as the trainer does next: FSDP1's gradients cannot be set aside
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)
        found = guard.before_step(state.batch)
        if any(event.action == "stop" for event in found):
            state.stop_training()
        if guard.gap is not None:
            self.log(logger, *guard.metrics())
        if found:  # all of them each time: a reader of the log uses the last table of a name
            rows = [[str(event[column]) for column in COLUMNS] for event in guard.events]
            logger.log_table(list(COLUMNS), rows, "guard_events", state.timestamp.batch.value)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Note the loss that the trainer logged, the mean over ranks."""
        if self.guard is not None:
            losses = getattr(state, "total_loss_dict", None) or {}
            self.guard.after_step(float(losses.get("loss/train/total", math.nan)))

    def carried_state(self) -> dict[str, Any]:
        """Recipes, counters and events; before training starts, what was loaded."""
        return self._loaded if self.guard is None else self.guard.state_dict()

    def take_carried_state(self, state: dict[str, Any]) -> None:
        """Keep the state until the model is ready."""
        self._loaded = state
