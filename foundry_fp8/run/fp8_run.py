"""FP8 in one run: what it is asked for, what each step does, what a checkpoint holds. Every trainer is an adapter of it."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundry_fp8.compat.compiled_model import is_compiled
from foundry_fp8.config import ConfigError, Positive, accept, from_mapping
from foundry_fp8.distributed.compression.apply import wrapper_of
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight
from foundry_fp8.layers.unit_linear import choose_gradient_scale
from foundry_fp8.model_structure.applied import applied
from foundry_fp8.model_structure.unchanged import as_it_was_if_it_fails
from foundry_fp8.model_structure.wrappers import without_ddp
from foundry_fp8.observe.guard.config import Event, GuardConfig
from foundry_fp8.observe.guard.guard import DivergenceGuard
from foundry_fp8.observe.measured_policy import MeasuredPolicy, measure_policy
from foundry_fp8.observe.precision_probe import LossOf, first_rows
from foundry_fp8.run.clashes import KEYS, refuse
from foundry_fp8.run.monitors import Monitors
from foundry_fp8.run.settings import Run
from foundry_fp8.run.training_state import FP8Parts, TrainingState, parts_of
from foundry_fp8.surgery.announcement import announcement, notices
from foundry_fp8.surgery.apply import apply_fp8
from foundry_fp8.surgery.first_batch import ForwardTrace, as_run
from foundry_fp8.surgery.fp8_config import FP8Config
from foundry_fp8.surgery.frozen_weights import send_frozen
from foundry_fp8.surgery.report import SurgeryReport
from foundry_fp8.surgery.rules import Measured
from foundry_fp8.surgery.timing import Clock, Moment

__all__ = ["FP8Run"]

log = logging.getLogger(__name__)


class FP8Run:
    """FP8 in a run: the conversion, the guard, ``recipe: measured``, monitors and the checkpoint's state.

    ``convert`` before DDP, FSDP and ``torch.compile``; ``start`` with the model as it is trained; ``begin_step`` and ``end_step``
    around each step, on every rank. The first step is watched: what was converted and did not run is a warning, and ``report``
    becomes that of what ran.

    Args:
        guard: Options of :class:`~foundry_fp8.DivergenceGuard`; ``None`` for no guard.
        monitors: Options of what is measured, by name: ``{"mfu": {}, "kurtosis": {"interval": 50}, "health": {}}``. One that fails is
            off for the rest of the run, with a logged error.
        settings: Of the run, as far as its trainer shows them; see :class:`~.settings.Run`.
        steps: Optimizer steps of the whole run, of which rules say shares (``0.9dur``).
        **options: The fields of :class:`~foundry_fp8.surgery.fp8_config.FP8Config` (``recipe``, ``exclude``, ...).

    Attributes:
        report: What became of every weight; ``None`` before ``convert``.
        guard: The run's guard, from ``start`` on.
        choice: What ``recipe: measured`` chose last.
        events: What the guard found and did in this step.
        step: Steps that are finished.
        clock: What is finished in every unit that the trainer counts; ``None``: steps alone.
        switched: What other rules have begun to hold with this step, in a sentence.

    Raises:
        ConfigError: Options that are not valid.
    """

    def __init__(
        self,
        *,
        guard: Mapping[str, Any] | None = None,
        monitors: Mapping[str, Mapping[str, Any]] | None = None,
        settings: Run | None = None,
        steps: int | None = None,
        **options: Any,
    ) -> None:
        self.settings = settings or Run(trainer="loop")
        self.key = KEYS[self.settings.trainer]
        if steps is not None:
            length = Moment(accept(Positive, steps, f"{self.key}.steps"))
            self.settings = dataclasses.replace(self.settings, length=length)
        self.options = options
        self.config = from_mapping(FP8Config, options, self.key)
        self.policy = self.config.policy(torch.device("cpu"))
        self.timed = self.config.enabled and bool(self.policy.moments)
        self.clock: Clock | None = None
        self.switched = ""
        self.guard_options = None if guard is None else dict(guard)
        if guard is not None:
            from_mapping(GuardConfig, dict(guard), f"{self.key}.guard")
        self.monitors = Monitors(monitors or {}, f"{self.key}.monitors")
        self.report: SurgeryReport | None = None
        self.guard: DivergenceGuard | None = None
        self.choice: MeasuredPolicy | None = None
        self.state: FP8Parts | None = None
        self.events: list[Event] = []
        self.loss_of: LossOf | None = None
        self.step = 0
        self.microbatches = 1
        self.model: nn.Module | None = None
        self._trace: ForwardTrace | None = None
        self._awaits_scale = self.config.runs_unit
        self._follows = self._keeps = self._measuring = False
        self._kept: dict[str, Any] | None = None

    # Before training

    def refuse(self, settings: Run) -> None:
        """Raise the first error of what does not go together, before anything is done."""
        refuse(dataclasses.replace(settings, fp8=self.config, guarded=self.guard_options is not None))

    def convert(
        self,
        model: nn.Module,
        settings: Run | None = None,
        *,
        device: torch.device | str | None = None,
        precision: str | None = None,
    ) -> SurgeryReport | None:
        """Convert ``model`` in place, and say so; ``None`` with ``enabled: false``.

        Args:
            model: Not wrapped and not compiled yet.
            settings: What its trainer knows by now.
            device: Where it will run; by default where it is.
            precision: Of what stays out of FP8: ``amp_bf16`` (the default), ``amp_fp16`` or ``fp32``.

        Raises:
            ConfigError: What does not go together, or cannot be converted; the model is as it was.
        """
        settings = settings or self.settings
        on = settings.device if device is None else torch.device(device)
        settings = dataclasses.replace(settings, device=on, precision=precision or settings.precision)
        fresh = self.config.enabled and applied(model, self.config) is None
        wrapped = wrapper_of(model) is not None or isinstance(model, nn.DataParallel) or is_compiled(model)
        codes = any(isinstance(p, FrozenFP8Weight) for p in model.parameters())
        self.refuse(dataclasses.replace(settings, wrapped=wrapped and fresh, keeps_codes=codes))
        self.settings, self.model = settings, model
        log_path = f"; log: {self.settings.log}" if self.settings.log else ""
        if not self.config.enabled:
            self.say(f"FP8: off ({self.key}.enabled: false){log_path}")
            return None
        with as_it_was_if_it_fails(model):
            report = apply_fp8(model, device=settings.device, **self.options)
            send_frozen(model)
            self.report, self.state, self._trace = report, FP8Parts(model), ForwardTrace(model)
            self.state.fp8.held = self.policy.held(defaultdict(int))
        log.info("%s\n%s\n%s", self.report.chosen, self.report.summary(), self.report.table())
        callbacks = [*settings.callbacks, *["DivergenceGuard"] * (self.guard_options is not None)]
        on = self._device(model)
        notes = notices(report, precision=settings.precision, device=on.type, callbacks=callbacks)
        if isinstance(self.config.recipe, Measured) and fresh:
            self.state.fp8.reconsider()
            warmup = self.config.recipe.warmup
            notes.append(f"measured: high precision for {warmup} batches, then by the table")
        around = settings.precision.removeprefix("amp_")
        self.say(announcement(self.report, around=around, log=settings.log or None, notes=notes))
        return self.report

    def follow(self, model: nn.Module) -> None:
        """See the training forwards of ``model``, for monitors and for a trainer that shows no batches."""
        self.model, self._follows = model, True
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def start(self, model: nn.Module, loss_of: LossOf | None = None) -> None:
        """Training begins.

        Args:
            model: As it is trained, wrapped or not.
            loss_of: ``loss_of(model, batch)``, the scalar loss of a training forward; the guard and ``recipe: measured`` need it.
        """
        self.model, self.loss_of = model, loss_of
        precision = self.settings.precision.removeprefix("amp_")
        if self.monitors.options and not self._follows:
            self.follow(model)
        self.monitors.start(model, device=self._device(model), high_precision=precision)
        if not self.config.enabled:
            return
        if self.guard_options is not None or isinstance(self.config.recipe, Measured):
            if loss_of is None:
                raise ConfigError(f"{self.key}: the guard and recipe: measured need loss_of(model, batch).")
            if self.guard_options is not None and self.guard is None:
                self.guard = DivergenceGuard(model, loss_of, **self.guard_options)
        self.state = TrainingState(model, self.guard)

    # Every step

    def begin_step(self, batch: Any = None) -> list[Event]:
        """A step begins: measure and act on ``batch`` if that is due, choose unit's gradient scale, watch what the first step runs.

        Args:
            batch: This rank's. ``None`` where the trainer shows none: the first microbatch that a followed model sees is measured on,
                at the end of the step.

        Returns:
            What the guard found and did. Where something is measured, FSDP1 must hold no gradients (:meth:`measures`).
        """
        self.events, self._kept, self._keeps = [], None, batch is None and self.measures(self.step + 1)
        if self.guard is not None:
            self.guard.gap = None
        if self.timed:
            self.follow_time()
        self.monitors.begin(self.step)
        if batch is not None:
            self._set_gradient_scale(batch)
            self._measure(batch)
        if self._trace is not None and self.state is not None and not self.state.fp8.awaits_choice:
            if self.settings.compiled or (self.model is not None and is_compiled(self.model)):
                log.info(
                    "Under torch.compile nobody checks which of the converted layers run: a graph keeps no ledger."
                )
                self._trace = None
            else:
                self._trace.arm()
        return self.events

    def follow_time(self) -> None:
        """Run what the rules that hold now say, and say once what has changed; ``begin_step`` does it."""
        assert self.state is not None and self.model is not None
        at, length, fp8 = self.clock or {"ba": self.step}, self.settings.length, self.state.fp8
        try:
            held = self.policy.held(at, length)
        except KeyError:
            raise ConfigError(f"{self.policy.untimely(at, length)}.") from None
        self.switched = ""
        if held != tuple(fp8.held or ()):
            fp8.hold(held, self._device(self.model))
            fp8.answered = True  # a history that begins here has lost nothing
            runs = Counter(str(module.turn) for module in fp8.modules.values() if module.turns)
            said = ", ".join(f"{count} linears {what}" for what, count in runs.items())
            self.switched = f"FP8: from step {self.step} on: {said}"
            self.say(self.switched)

    def end_step(self, loss: float | Tensor | None = None) -> dict[str, float]:
        """A step is over, its optimizer's too: finish the pass of delayed scaling, and report what the first step ran.

        Args:
            loss: The same on every rank; a jump has the guard measure the next batch.

        Returns:
            What to log.
        """
        self.step += 1
        found = self.monitors.end(self.step)
        self._report_what_ran()
        if self._kept is not None:
            self._measure(self._kept)
            self._kept = None
        if self.state is not None:  # after the measurement: what it recorded is of one rank until then
            self.state.finish_pass()
        if self.guard is not None:
            found |= self.guard.metrics()[0]
            if loss is not None:
                self.guard.after_step(loss)
        return found

    def measures(self, step: int | None = None) -> bool:
        """Whether the guard or ``recipe: measured`` measures after so many finished steps, by default as many as there are."""
        step = self.step if step is None else step
        if self.guard is not None:
            self.guard.batch = step
            if self.guard.due():
                return True
        return self._chooses(step)

    def _chooses(self, step: int) -> bool:
        """For ``recipe: measured``: after ``warmup`` steps, and where the guard has acted."""
        options = self.config.recipe
        if (
            not isinstance(options, Measured)
            or self.state is None
            or self.loss_of is None
            or step < options.warmup
        ):
            return False
        fp8 = self.state.fp8
        return fp8.awaits_choice or any(m.recipe != m.configured_recipe for m in fp8.modules.values())

    def _measure(self, batch: Any) -> None:
        self._measuring = True
        try:
            if self.guard is not None:
                self.guard.batch = self.step
                self.events = self.guard.before_step(batch)
            if self._chooses(self.step):
                self._choose(batch)
        finally:
            self._measuring = False

    def _choose(self, batch: Any) -> None:
        options = self.config.recipe
        assert isinstance(options, Measured) and self.state is not None
        assert self.model is not None and self.loss_of is not None
        self.state.fp8.reconsider()
        model, rows, how = without_ddp(self.model), first_rows(batch, options.rows), options
        choice = self.choice = measure_policy(model, self.loss_of, rows, error=how.error, recipes=how.recipes)
        self.state.fp8.choose(choice.recipes)
        if self.report is not None:
            self.report = self.report.with_choice(choice.recipes, choice.why, self.config.wgrad)
        if not any(choice.recipes.values()):
            log.warning("%s.recipe: measured: %s.", self.key, choice.summary().splitlines()[-1])
        self.say(f"FP8: measured:\n{choice.summary()}")

    def _set_gradient_scale(self, batch: Any) -> None:
        """For the recipe unit with ``gradient_scale: auto``: the tokens of this rank's first batch decide, for the whole run."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        if self.state is None or not self._awaits_scale or not isinstance(ids, Tensor):
            return
        tokens, self._awaits_scale = ids.numel() * self.microbatches, False
        found = choose_gradient_scale(self.state.fp8.modules.values(), tokens)
        if found is not None:
            log.info(
                "%s.recipe.gradient_scale: auto is %d, the power of two nearest to %d tokens x width %d.",
                self.key,
                found[0],
                tokens,
                found[1],
            )

    @torch.compiler.disable
    def _see(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._measuring or not (model.training and torch.is_grad_enabled()):
            return
        self._set_gradient_scale(kwargs)
        self.monitors.see(kwargs)
        if self._keeps:
            self._keeps = False
            self._kept = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}

    @property
    def started(self) -> bool:
        """Whether ``start`` has been called, so that the state is complete."""
        return isinstance(self.state, TrainingState)

    @property
    def watches(self) -> bool:
        """Whether the report is still that of the conversion: no step has shown what runs."""
        return self._trace is not None

    def _report_what_ran(self) -> None:
        if self._trace is None or self.state is None or self.state.fp8.awaits_choice:
            return
        assert self.report is not None
        self._trace.disarm()
        before, (self.report, warnings) = self.report, as_run(self.report, self._trace)
        self._trace = None
        for warning in warnings:
            log.warning("%s", warning)
        if self.report.converted_share != before.converted_share:
            log.info("What the first batch ran: %s", self.report.summary())

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside model, optimizer and data (:meth:`TrainingState.state_dict`); every rank calls it."""
        assert isinstance(self.state, TrainingState), "call start() first"
        (parts,) = self.state.state_dict()["state"]
        return {"state": ({**parts, "step": self.step},)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave, or ``training_state`` or Composer's algorithm; what it lacks starts afresh.

        Raises:
            RuntimeError: It is of another recipe or of other layers, or no such state.
        """
        assert self.state is not None, "convert first"
        saved, awaited = parts_of(state), self.state.fp8.awaits_choice
        self.state.load_state_dict(state)
        self.step = saved.get("step", self.step if self.guard is None else self.guard.batch)
        fp8 = self.state.fp8
        if awaited and not fp8.awaits_choice and self.report is not None:
            recipes = {name: layer.configured_recipe for name, layer in fp8.modules.items()}
            self.report = self.report.with_choice(recipes, {}, self.config.wgrad)

    def say(self, text: str) -> None:
        """On one rank, and not through logging: LLM Foundry leaves this package's loggers at WARNING."""
        first = dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"
        if self.config.announce and first:
            print(text, file=sys.stderr, flush=True)

    def _device(self, model: nn.Module) -> torch.device:
        return self.settings.device or next((p.device for p in model.parameters()), torch.device("cpu"))
