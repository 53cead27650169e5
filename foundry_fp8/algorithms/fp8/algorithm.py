"""The Composer algorithm ``fp8``."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from composer.core import Event, State
from composer.loggers import Logger

from foundry_fp8.algorithms.method import Method, warns_without_effect
from foundry_fp8.callbacks.base import training_loss
from foundry_fp8.callbacks.run_log import ensure_run_log, log_facts
from foundry_fp8.compat.composer_device import device_of
from foundry_fp8.observe.measured_policy import COLUMNS
from foundry_fp8.run.fp8_run import FP8Run
from foundry_fp8.run.settings import Run
from foundry_fp8.run.training_state import parts_of
from foundry_fp8.surgery.report import SurgeryReport
from foundry_fp8.surgery.rules import Measured
from foundry_fp8.surgery.timing import Moment, length_of

__all__ = ["FP8"]

log = logging.getLogger(__name__)


class FP8(Method):
    """Runs the linear layers of the model in FP8: :class:`~foundry_fp8.run.fp8_run.FP8Run` on Composer's events.

    On ``Event.INIT`` it converts the model, before the trainer wraps it; on ``Event.BATCH_END`` it finishes the delayed-scaling
    update, so that what is saved in a checkpoint is complete.

    Args:
        **options: The fields of :class:`~foundry_fp8.surgery.apply.FP8Config`.
    """

    def __init__(self, **options: Any) -> None:
        self.run = FP8Run(settings=Run(), **options)
        self.options, self.config = self.run.options, self.run.config

    @property
    def report(self) -> SurgeryReport | None:
        """What became of every weight; ``None`` before ``Event.INIT``, and from the first batch on what really ran."""
        return self.run.report

    def match(self, event: Event, state: State) -> bool:
        """Run on INIT, BATCH_START and BATCH_END; with times AFTER_DATALOADER too."""
        if not self.config.enabled:
            return event == Event.INIT
        return event in (Event.INIT, Event.BATCH_START, Event.BATCH_END) or (self.run.timed and event == Event.AFTER_DATALOADER)  # fmt: skip

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Convert the model, or begin or end a step of the run; and log what was found."""
        run = self.run
        if event == Event.INIT:
            self._convert(state, logger)
            return
        if event == Event.BATCH_END:
            watched = run.watches
            run.end_step()
            if watched and not run.watches:
                log_facts(logger, {"fp8_as_run": run.report.to_dict()})  # type: ignore[union-attr]
            return
        run.model, run.loss_of, run.step = state.model, training_loss(state), state.timestamp.batch.value
        if event == Event.AFTER_DATALOADER:  # before the guard measures
            run.clock = {unit: state.timestamp.get(unit).value for unit in ("ba", "ep", "sp", "tok")}
            run.settings = dataclasses.replace(run.settings, length=_length_of(state))
            run.follow_time()
            if run.switched:
                log_facts(logger, {"fp8_switch": {"step": run.step, "said": run.switched}})
            return
        if run.measures():  # as the trainer does next: FSDP1's gradients cannot be set aside
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)
        before = run.choice
        run.begin_step(state.batch)
        if run.choice is not before and run.choice is not None and run.report is not None:
            if not run.watches:  # otherwise once the batch has shown what runs
                log_facts(logger, {"fp8_as_run": run.report.to_dict()})
            rows = [list(row) for row in run.choice.rows()]
            logger.log_table([*COLUMNS], rows, "fp8_policy", run.step)

    def _convert(self, state: State, logger: Logger) -> None:
        settings = Run(precision=state.precision.value, fsdp=state.fsdp_config, length=_length_of(state))
        self.run.refuse(settings)
        run_log = ensure_run_log(state, logger)
        settings = dataclasses.replace(
            settings,
            device=device_of(state),
            callbacks=[type(callback).__name__ for callback in state.callbacks],
            log=str(run_log.path_of(state.run_name)),
        )
        report = None
        with warns_without_effect():
            report = self.run.convert(state.model, settings)
        if report is not None:
            found = report.to_dict()
            if isinstance(self.config.recipe, Measured):
                found["recipe"] = dataclasses.asdict(self.config.recipe)
            logger.log_hyperparameters({"fp8": found})

    def state_dict(self) -> dict[str, Any]:
        """The FP8 state, in the form of ``foundry_fp8.training_state``; beside it its repr, as Composer's own algorithms have it."""
        parts = self.run.state
        return {**super().state_dict(), **({} if parts is None else parts.collected())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the FP8 state; raises ``RuntimeError`` if it does not fit (see :meth:`FP8Run.load_state_dict`)."""
        if self.run.state is None:  # switched off, or a model without a linear
            return
        if parts_of(state):
            self.run.load_state_dict(state)
            return
        log.warning(
            "%s: the checkpoint is of a run with enabled: false, so FP8's state starts afresh.", self.run.key
        )
        self.run.state.fp8.answered = True


def _length_of(state: State) -> Moment | None:
    """Of the run, as far as it is known; epochs in batches where the dataloader says how many."""
    length, batches = length_of(getattr(state, "max_duration", None)), getattr(state, "dataloader_len", None)
    in_epochs = length is not None and length.unit == "ep" and batches is not None
    return Moment(length.value * int(batches)) if in_epochs else length  # type: ignore[union-attr, arg-type, operator]
