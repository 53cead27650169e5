"""``FP8Callback``: FP8 in Hugging Face's ``Trainer``, and in what builds on it."""

from __future__ import annotations

import base64
import io
import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from foundry_fp8.compat.compiled_model import is_compiled
from foundry_fp8.config import ConfigError, from_mapping
from foundry_fp8.integrations.monitors import Monitors
from foundry_fp8.integrations.refusals import KEY, refuse
from foundry_fp8.integrations.training_state import TrainingState
from foundry_fp8.layers.state import FP8State
from foundry_fp8.layers.unit_linear import choose_gradient_scale
from foundry_fp8.observe.guard.config import GuardConfig
from foundry_fp8.observe.guard.guard import DivergenceGuard
from foundry_fp8.surgery.announcement import announcement, notices
from foundry_fp8.surgery.apply import FP8Config, apply_fp8
from foundry_fp8.surgery.first_batch import ForwardTrace, as_run
from foundry_fp8.surgery.frozen_weights import send_frozen
from foundry_fp8.surgery.report import SurgeryReport

__all__ = ["FP8Callback"]

log = logging.getLogger(__name__)


class FP8Callback(TrainerCallback, ExportableState):
    """Trains in FP8: ``Trainer(..., callbacks=[FP8Callback(recipe="delayed", guard={})])``.

    It converts the model when the trainer is made, before the optimizer and any wrapper. What a resumed run needs is in each
    checkpoint's ``trainer_state.json``, and taken from there. The guard measures after every ``interval``-th optimizer step, on the
    first microbatch of that step, with the model's own loss; it acts before the checkpoint of that step. What it finds goes into
    the next entry that Trainer logs.

    Args:
        guard: Options of :class:`~foundry_fp8.DivergenceGuard`; ``None`` for no guard.
        monitors: Options of what is measured, by name: ``{"mfu": {}, "kurtosis": {"interval": 50}, "health": {}}``
            (:class:`~foundry_fp8.observe.flops.mfu.MFUMeter`, :class:`~foundry_fp8.observe.kurtosis_meter.KurtosisMeter`,
            :class:`~foundry_fp8.observe.health_meter.HealthMeter`). One that fails is off for the rest of the run, with a logged error.
        **options: The fields of :class:`~foundry_fp8.surgery.apply.FP8Config` (``recipe``, ``exclude``, ...).

    Attributes:
        report: What became of every weight; from the first step on what really ran.
        guard: The run's guard, from the beginning of training on.

    Raises:
        ConfigError: Options that are not valid; when the trainer is made, what cannot run together.
    """

    def __init__(
        self,
        *,
        guard: Mapping[str, Any] | None = None,
        monitors: Mapping[str, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        self.options = options
        self.config = from_mapping(FP8Config, options, KEY)
        self.guard_options = None if guard is None else dict(guard)
        if guard is not None:
            from_mapping(GuardConfig, dict(guard), f"{KEY}.guard")
        self.monitors = Monitors(monitors or {})
        self.report: SurgeryReport | None = None
        self.guard: DivergenceGuard | None = None
        self.saved: str | None = None
        self._model: nn.Module | None = None
        self._state: TrainingState | None = None
        self._trace: ForwardTrace | None = None
        self._microbatches = 1
        self._runs_unit = self.config.runs_unit
        self._wanted = self._measuring = False
        self._batch: dict[str, Any] | None = None
        self._pending: dict[str, float] = {}

    # Events of Trainer

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Convert the model."""
        model: nn.Module = kwargs["model"]
        self._follow(model)
        if not self.config.enabled:
            return
        refuse(args, model, self.config, guarded=self.guard_options is not None)
        self.report = apply_fp8(model, device=args.device, **self.options)
        send_frozen(model)
        self._trace = ForwardTrace(model)
        precision = _precision(args)
        if self.config.announce and args.process_index == 0:
            guards = ["DivergenceGuard"] * (self.guard_options is not None)
            amp = precision if precision == "fp32" else f"amp_{precision}"
            notes = notices(self.report, precision=amp, device=args.device.type, callbacks=guards)
            print(announcement(self.report, around=precision, notes=notes), file=sys.stderr, flush=True)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Make the guard, and go on with the checkpoint's state."""
        model: nn.Module = kwargs["model"]
        if self._model is None and FP8State.of(model) is not None:
            self._follow(model)  # made by Trainer, of a checkpoint (restore_callback_states_from_checkpoint)
        if self._model is None or (self.config.enabled and FP8State.of(model) is None):
            raise ConfigError(
                f"{KEY}: the model was not converted when the trainer was made. Pass it in Trainer(callbacks=[...]): "
                "add_callback comes too late."
            )
        self.monitors.start(model, device=args.device, high_precision=_precision(args))
        self._microbatches = args.gradient_accumulation_steps
        if not self.config.enabled:
            return
        if self.guard_options is not None:
            self.guard = DivergenceGuard(model, _own_loss, **self.guard_options)
        self._state = TrainingState(model, self.guard)
        if state.global_step > 0:
            kept: Any = state.stateful_callbacks  # Trainer makes a mapping of it
            mine = kept.get(KEY)
            saved = mine["attributes"]["saved"] if isinstance(mine, dict) else None
            if saved is None:
                self._state.starts_afresh()
            else:
                self._state.load_state_dict(_decoded(saved))

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep this step's first microbatch if the guard measures after it; watch what the first step runs."""
        self.monitors.begin(state.global_step)
        if self.guard is not None:
            self.guard.batch = state.global_step + 1
            self._wanted = self.guard.due()
        if self._trace is not None:
            if is_compiled(kwargs["model"]) or args.torch_compile:
                log.info("Under torch.compile nobody checks which of the converted layers run.")
                self._trace = None
            else:
                self._trace.arm()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure and act, and finish the pass of delayed scaling on every rank. Gradients are gone by now."""
        self._pending |= self.monitors.end(state.global_step)
        if self._trace is not None and self.report is not None:
            self._trace.disarm()
            self.report, warnings = as_run(self.report, self._trace)
            for warning in warnings:
                log.warning("%s", warning)
            self._trace = None
        if self.guard is not None and self._batch is not None:
            self._measure(self.guard, state, control)
        if self._state is not None:  # after the measurement: what it recorded is of one rank until then
            self._state.finish_pass()

    def _measure(self, guard: DivergenceGuard, state: TrainerState, control: TrainerControl) -> None:
        batch, self._batch = self._batch, None
        guard.batch, self._measuring = state.global_step, True
        try:
            found = guard.before_step(batch)
        finally:
            self._measuring = False
        self._pending |= guard.metrics()[0]
        for event in found:
            entry: dict[str, Any] = {"guard": str(event), "step": state.global_step, "epoch": state.epoch}
            state.log_history.append(entry)
        if any(event.action == "stop" for event in found):
            control.should_training_stop = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put what was found into Trainer's own entry, and show its loss to the guard."""
        logs: dict[str, Any] = kwargs.get("logs") or {}
        if "loss" not in logs:
            return
        if self.guard is not None:
            self.guard.after_step(float(logs["loss"]))
        pending, self._pending = self._pending, {}
        logs.update(pending)
        state.log_history[-1].update(pending)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave no hook behind."""
        self.monitors.detach()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An evaluation is over; what it ran is not training."""
        self.monitors.after_evaluation()

    def state(self) -> dict[str, Any]:
        """What Trainer writes into ``trainer_state.json``: the options, and the training state as text."""
        options = {k: v.to_dict() if hasattr(v, "to_dict") else v for k, v in self.options.items()}
        saved = None if self._state is None else _encoded(self._state.collected())
        asked = {"guard": self.guard_options, "monitors": self.monitors.options}
        return {"args": {**options, **asked}, "attributes": {"saved": saved}}

    # The model's forwards

    def _follow(self, model: nn.Module) -> None:
        self._model = model
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    @torch.compiler.disable
    def _see(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._measuring or not (model.training and torch.is_grad_enabled()):
            return
        ids = kwargs.get("input_ids")
        found = FP8State.of(model)
        if isinstance(ids, Tensor) and found is not None and self._runs_unit:
            choose_gradient_scale(found.modules.values(), ids.numel() * self._microbatches)
        self.monitors.see(kwargs)
        if self._wanted:
            self._wanted = False
            self._batch = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}


def _precision(args: Any) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"{KEY}.guard: the model gives no loss of its own (label_smoothing_factor and compute_loss_func compute another outside). "
            "Give it labels, or leave the guard out."
        )
    return loss


def _encoded(state: dict[str, Any]) -> str:
    file = io.BytesIO()
    torch.save(state, file)
    return base64.b64encode(file.getvalue()).decode()


def _decoded(text: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return found
