"""``FP8Callback``: FP8 in Hugging Face's ``Trainer``, and in what builds on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.state import FP8State
from foundry_fp8.observe.guard.guard import DivergenceGuard
from foundry_fp8.run.clashes import CALLBACK
from foundry_fp8.run.fp8_run import FP8Run
from foundry_fp8.run.settings import Run
from foundry_fp8.run.training_state import from_text, to_text
from foundry_fp8.surgery.report import SurgeryReport
from foundry_fp8.surgery.timing import Moment

__all__ = ["FP8Callback"]


class FP8Callback(TrainerCallback, ExportableState):
    """Trains in FP8: ``Trainer(..., callbacks=[FP8Callback(recipe="delayed", guard={})])``.

    :class:`~foundry_fp8.run.fp8_run.FP8Run` on Trainer's events. It converts the model when the trainer is made, before the optimizer
    and any wrapper. What a resumed run needs is in each checkpoint's ``trainer_state.json``, and taken from there. The guard and
    ``recipe: measured`` measure after a step, on its first microbatch, with the model's own loss; the guard acts before the checkpoint
    of that step. What is found goes into the next entry that Trainer logs.

    Args:
        **options: Those of :class:`~foundry_fp8.run.fp8_run.FP8Run`: ``guard``, ``monitors``, ``recipe``, ``exclude``, ...

    Raises:
        ConfigError: Options that are not valid; when the trainer is made, what cannot run together.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.saved: str | None = None
        self._new_run()

    def _new_run(self) -> None:
        self.run = FP8Run(settings=Run(trainer="transformers"), **self.options)
        self.config, self.monitors = self.run.config, self.run.monitors
        self._pending: dict[str, float] = {}

    @property
    def report(self) -> SurgeryReport | None:
        """What became of every weight; from the first step on what really ran."""
        return self.run.report

    @property
    def guard(self) -> DivergenceGuard | None:
        """The run's guard, from the beginning of training on."""
        return self.run.guard

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Convert the model."""
        self._take(args, kwargs["model"])

    def _take(self, args: Any, model: nn.Module) -> None:
        self.run.follow(model)
        if self.config.enabled:
            self.run.convert(model, settings_of(args))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Make the guard, and go on with the checkpoint's state."""
        model = kwargs["model"]
        if self.run.model is not None and all(one is not self.run.model for one in model.modules()):
            # Trainer(model_init=...) makes another model whenever it trains. Parameters keep their identity, so it is not
            # too late for an optimizer that has them, nor for DDP around it.
            self._new_run()
            self._take(args, model)
        run = self.run
        if run.model is None and FP8State.of(model) is not None:
            run.follow(model)  # made by Trainer, of a checkpoint (restore_callback_states_from_checkpoint)
        if run.model is None or (self.config.enabled and FP8State.of(model) is None):
            raise ConfigError(
                f"{CALLBACK}: the model was not converted when the trainer was made. Pass it in Trainer(callbacks=[...]): "
                "add_callback comes too late."
            )
        run.settings = dataclasses.replace(settings_of(args), length=Moment(state.max_steps))
        run.refuse(run.settings)
        run.step = state.global_step
        run.microbatches = args.gradient_accumulation_steps
        run.start(model, own_loss)
        if run.state is not None and state.global_step > 0:
            kept: Any = state.stateful_callbacks  # Trainer makes a mapping of it
            mine = kept.get(CALLBACK)
            saved = mine["attributes"]["saved"] if isinstance(mine, dict) else None
            if saved is None:
                run.state.starts_afresh()
            else:
                run.load_state_dict(from_text(saved))
            run.step = state.global_step

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep this step's first microbatch if something is measured after it; watch what the first step runs."""
        self.run.begin_step()
        if self.run.switched:
            _note(state, fp8=self.run.switched)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure and act. Gradients are gone by now."""
        self._pending |= self.run.end_step()
        for event in self.run.events:
            _note(state, guard=str(event))
            if event.action == "stop":
                control.should_training_stop = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put what was found into Trainer's own entry, and show its loss to the guard."""
        if "loss" in (logs := kwargs.get("logs") or {}):
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
        run, ready = self.run, self.run.started and self.run.state
        options = {k: v.to_dict() if hasattr(v, "to_dict") else v for k, v in run.options.items()}
        asked = {"guard": run.guard_options, "monitors": run.monitors.options}
        saved = to_text(ready.collected()) if ready else None
        return {"args": {**options, **asked}, "attributes": {"saved": saved}}


def _note(state: Any, **said: Any) -> None:
    state.log_history.append({**said, "step": state.global_step, "epoch": state.epoch})


def settings_of(args: TrainingArguments) -> Run:
    """A run as Trainer's and Accelerate's options say it, for the table of what cannot run together."""
    accelerate = AcceleratorState()
    half = "amp_bf16" if args.bf16 else "amp_fp16" if args.fp16 else "fp32"
    return Run(
        trainer="transformers",
        precision="amp_fp8" if accelerate.mixed_precision == "fp8" else half,
        fsdp=args.fsdp or None,
        compiled=bool(args.torch_compile),
        zero_stage=getattr(getattr(accelerate, "deepspeed_plugin", None), "zero_stage", None),
        copied_to=args.n_gpu,
        device=args.device,
        length=Moment(args.max_steps) if args.max_steps > 0 else None,
    )


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model itself gives; ``ConfigError`` where it gives none."""
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"{CALLBACK}.guard: the model gives no loss of its own (label_smoothing_factor and compute_loss_func compute another outside). "
            "Give it labels, or leave the guard out."
        )
    return loss
