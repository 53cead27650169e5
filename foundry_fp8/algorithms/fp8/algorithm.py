"""The Composer algorithm ``fp8``."""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any

from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist

from foundry_fp8.callbacks.base import model_of, training_loss
from foundry_fp8.callbacks.run_log import ensure_run_log
from foundry_fp8.compat.compiled_model import is_compiled
from foundry_fp8.compat.composer_device import device_of
from foundry_fp8.config import from_mapping
from foundry_fp8.layers.state import FP8State
from foundry_fp8.layers.unit_linear import choose_gradient_scale
from foundry_fp8.observe.guard.rows import first_rows
from foundry_fp8.observe.measured_policy import COLUMNS, measure_policy
from foundry_fp8.run.clashes import refuse
from foundry_fp8.run.settings import Run, in_plan
from foundry_fp8.surgery.announcement import announcement, notices
from foundry_fp8.surgery.apply import KEY, FP8Config, apply_fp8
from foundry_fp8.surgery.attention import FP8AttentionState
from foundry_fp8.surgery.first_batch import ForwardTrace, as_run
from foundry_fp8.surgery.frozen_weights import send_frozen
from foundry_fp8.surgery.report import SurgeryReport
from foundry_fp8.surgery.rules import Measured

__all__ = ["FP8"]

log = logging.getLogger(__name__)


class FP8(Algorithm):
    """Runs the linear layers of the model in FP8.

    Runs on ``Event.INIT``, before the trainer wraps the model, to convert it, and on ``Event.BATCH_END`` to finish the
    delayed-scaling update, so that what is saved in a checkpoint is complete. The first batch is watched: what was converted
    and did not run is a warning, and the report becomes that of what ran.

    Args:
        **options: The fields of :class:`~foundry_fp8.surgery.apply.FP8Config`.

    Attributes:
        report: What became of every weight; ``None`` before ``Event.INIT``, and from the first batch on what really ran.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.config = from_mapping(FP8Config, options, KEY)
        self.report: SurgeryReport | None = None
        self._fp8_state: FP8State | None = None
        self._attention_state: FP8AttentionState | None = None
        self._trace: ForwardTrace | None = None
        self._scaled = False

    def __repr__(self) -> str:
        return f"FP8({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"

    @property
    def find_unused_parameters(self) -> bool:
        """Every parameter takes part as before."""
        return False

    def match(self, event: Event, state: State) -> bool:
        """Run on INIT, BATCH_START and BATCH_END."""
        if not self.config.enabled:
            return event == Event.INIT
        return event in (Event.INIT, Event.BATCH_START, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Convert the model, finish the update, or see what the first batch ran."""
        if event == Event.BATCH_START:
            assert self._fp8_state is not None
            self._set_gradient_scale(state)
            self._measure(state, logger)
            if self._trace is not None and not self._fp8_state.awaits_choice:
                self._watch(state)
            return
        if event == Event.BATCH_END:
            assert self._fp8_state is not None
            self._fp8_state.update()
            if self._attention_state is not None:
                self._attention_state.update()
            if self._trace is not None and not self._fp8_state.awaits_choice:
                self._report_what_ran(self._trace, logger)
                self._trace = None
            return
        run = Run(precision=state.precision.value, fsdp=state.fsdp_config, fp8=self.config)
        refuse(run)
        run_log = ensure_run_log(state, logger)
        if not self.config.enabled:
            self._say(f"FP8: off ({KEY}.enabled: false); log: {run_log.path_of(state.run_name)}")
            return
        self.report = apply_fp8(state.model, device=device_of(state), **self.options)
        plan = () if state.tp_config is None else (state.tp_config.layer_plan or ())
        refuse(dataclasses.replace(run, parallel_layers=in_plan(self.report.converted, plan)))
        send_frozen(state.model)
        self._fp8_state = FP8State.of(state.model)
        assert self._fp8_state is not None
        self._attention_state = FP8AttentionState.of(state.model)
        log.info("%s\n%s\n%s", self.report.chosen, self.report.summary(), self.report.table())
        found = self.report.to_dict()
        self._say(self._announcement(self.report, state, str(run_log.path_of(state.run_name))))
        if isinstance(self.config.recipe, Measured):
            found["recipe"] = dataclasses.asdict(self.config.recipe)
            self._fp8_state.reconsider()
            self._say(
                f"  measured: high precision for {self.config.recipe.warmup} batches, then by the table"
            )
        logger.log_hyperparameters({"fp8": found})
        self._trace = ForwardTrace(state.model)

    def _say(self, text: str) -> None:
        """Not through logging: LLM Foundry leaves this package's loggers at WARNING."""
        if self.config.announce and dist.get_global_rank() == 0:
            print(text, file=sys.stderr, flush=True)

    @staticmethod
    def _announcement(report: SurgeryReport, state: State, log_path: str) -> str:
        notes = notices(
            report,
            precision=state.precision.value,
            device="cuda" if state.device.name == "gpu" else state.device.name,
            callbacks=[type(callback).__name__ for callback in state.callbacks],
        )
        around = state.precision.value.removeprefix("amp_")
        return announcement(report, around=around, log=log_path, notes=notes)

    def _set_gradient_scale(self, state: State) -> None:
        """For the recipe unit with ``gradient_scale: auto``: the tokens of this rank's first batch decide, for the whole run."""
        assert self._fp8_state is not None
        if not self._scaled and self.config.runs_unit:
            tokens = state.batch["input_ids"].numel()
            found = choose_gradient_scale(self._fp8_state.modules.values(), tokens)
            if found is not None:
                log.info(
                    "%s.recipe.gradient_scale: auto is %d, the power of two nearest to %d tokens x width %d.",
                    KEY,
                    found[0],
                    tokens,
                    found[1],
                )
        self._scaled = True

    def _measure(self, state: State, logger: Logger) -> None:
        """For ``recipe: measured``: choose after ``warmup`` batches and where the guard has acted, and say what was chosen and why."""
        options, fp8 = self.config.recipe, self._fp8_state
        assert fp8 is not None and self.report is not None
        if not isinstance(options, Measured) or state.timestamp.batch.value < options.warmup:
            return
        if not fp8.awaits_choice and all(m.recipe == m.configured_recipe for m in fp8.modules.values()):
            return
        fp8.reconsider()
        for optimizer in state.optimizers:  # as the trainer does next: FSDP1's gradients cannot be set aside
            optimizer.zero_grad(set_to_none=True)
        batch, loss_of = first_rows(state.batch, options.rows), training_loss(state)
        choice = measure_policy(model_of(state), loss_of, batch, error=options.error, recipes=options.recipes)
        fp8.choose(choice.recipes)
        self.report = self.report.with_choice(choice.recipes, choice.why, self.config.wgrad)
        if not any(choice.recipes.values()):
            log.warning("%s.recipe: measured: %s.", KEY, choice.summary().splitlines()[-1])
        if self._trace is None:  # otherwise once the batch has shown what runs
            logger.log_hyperparameters({"fp8_as_run": self.report.to_dict()})
        rows = [list(row) for row in choice.rows()]
        logger.log_table([*COLUMNS], rows, "fp8_policy", state.timestamp.batch.value)
        self._say(f"FP8: measured:\n{choice.summary()}")

    def _watch(self, state: State) -> None:
        assert self._trace is not None
        if is_compiled(state.model):
            log.info(
                "Under torch.compile nobody checks which of the converted layers run: a graph keeps no ledger."
            )
            self._trace = None
        else:
            self._trace.arm()

    def _report_what_ran(self, trace: ForwardTrace, logger: Logger) -> None:
        trace.disarm()
        assert self.report is not None
        before, (self.report, warnings) = self.report, as_run(self.report, trace)
        for warning in warnings:
            log.warning("%s", warning)
        if self.report.converted_share != before.converted_share:
            log.info("What the first batch ran: %s", self.report.summary())
        logger.log_hyperparameters({"fp8_as_run": self.report.to_dict()})

    def state_dict(self) -> dict[str, Any]:
        """The FP8 state (see :meth:`FP8State.state_dict`)."""
        found = super().state_dict()  # its repr, as Composer's own algorithms have it
        if self._fp8_state is not None:
            found |= self._fp8_state.state_dict()
        if self._attention_state is not None:
            found["attention"] = self._attention_state.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the FP8 state; raises ``RuntimeError`` if it does not fit (see :meth:`FP8State.load_state_dict`)."""
        if not self.config.enabled or "recipe" not in state:
            if self.config.enabled:
                log.warning(
                    "%s: the checkpoint is of a run with enabled: false, so FP8's state starts afresh.", KEY
                )
                if self._fp8_state is not None:
                    self._fp8_state.answered = True
            return
        assert self._fp8_state is not None, "Composer loads algorithms after Event.INIT"
        awaited = self._fp8_state.awaits_choice
        self._fp8_state.load_state_dict(state)
        if awaited and not self._fp8_state.awaits_choice and self.report is not None:
            recipes = {name: layer.configured_recipe for name, layer in self._fp8_state.modules.items()}
            self.report = self.report.with_choice(recipes, {}, self.config.wgrad)
        if self._attention_state is not None:
            self._attention_state.load_state_dict(state.get("attention", {}))
