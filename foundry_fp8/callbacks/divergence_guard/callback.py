"""The Composer callback ``divergence_guard``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from composer.core import Algorithm, Event, State
from composer.loggers import Logger

from foundry_fp8.callbacks.base import Monitor, model_of, training_loss
from foundry_fp8.observe.guard.config import GuardConfig
from foundry_fp8.observe.guard.guard import DivergenceGuard as Guard

__all__ = ["DivergenceGuard", "DivergenceGuardConfig"]

COLUMNS = ("batch", "unit", "action", "signal", "detail")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergenceGuardConfig(GuardConfig):
    """The YAML under ``callbacks.divergence_guard``."""

    details: bool = False
    """Send the error of each block to every logger; otherwise the run log alone has it."""


class DivergenceGuardState(Algorithm):
    """The guard's state in the checkpoint: recipes, counters and events. Does nothing in training.

    Composer writes a callback's state into a sharded checkpoint key by key, and refuses one that lacks a key which is there when it is
    loaded: state that grows, or a guard that is added to an older run, would end the resume. An algorithm's is one value, read whatever
    it holds, and one that is missing is a warning.
    """

    def __init__(self, owner: DivergenceGuard) -> None:
        self.owner = owner

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def match(self, event: Event, state: State) -> bool:
        """No event."""
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Never called."""

    def state_dict(self) -> dict[str, Any]:
        """Before training starts, what was loaded."""
        guard = self.owner.guard
        return {**super().state_dict(), **(self.owner.loaded if guard is None else guard.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep it until the model is ready."""
        self.owner.loaded = state


class DivergenceGuard(Monitor):
    """Runs :class:`~foundry_fp8.observe.guard.guard.DivergenceGuard` in a trainer.

    It measures on ``Event.AFTER_DATALOADER``, before other callbacks attach hooks to the model, and reads the loss on ``BATCH_END``.

    Args:
        **options: The fields of :class:`DivergenceGuardConfig`.
    """

    key = "divergence_guard"
    config_class = DivergenceGuardConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.guard: Guard | None = None  # from the start of training on
        self.loaded: dict[str, Any] = {}  # a checkpoint's state, until then

    def init(self, state: State, logger: Logger) -> None:
        """Have the state saved."""
        state.algorithms.append(DivergenceGuardState(self))

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the layers, and set them to what a checkpoint says."""
        if self.guard is not None:  # a second fit() goes on where the first one stopped
            return
        self.guard = Guard(model_of(state), training_loss(state), **self.meter_options)
        if self.loaded:
            self.guard.load_state_dict(self.loaded)

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
