"""The Composer Algorithm."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from composer.core import Event, State
from composer.core.precision import get_precision_context
from composer.loggers import Logger
from torch import Tensor

from foundry_fp8.activations.checkpointing.apply import (
    KEY,
    ActivationCheckpointingConfig,
    switch_off_cache,
    wrap_selected,
)
from foundry_fp8.activations.checkpointing.targets import Selection, select
from foundry_fp8.activations.compression.apply import apply_activation_compression
from foundry_fp8.algorithms.activation_compression.algorithm import ActivationCompression
from foundry_fp8.algorithms.method import Method, warns_without_effect
from foundry_fp8.compat.compiled_model import is_compiled
from foundry_fp8.model_structure.applied import applied, remember
from foundry_fp8.model_structure.wrappers import checkpoint_wrappers, without_ddp
from foundry_fp8.run.clashes import refuse
from foundry_fp8.run.settings import Run

__all__ = ["ActivationCheckpointing"]

log = logging.getLogger(__name__)


class ActivationCheckpointing(Method):
    """Recompute chosen modules in backward, chosen by name and block or planned from a memory budget.

    Runs on ``Event.INIT`` (targets are checked on the plain model), ``Event.AFTER_LOAD`` (checkpoints go inside the
    FSDP units, which exist by then) and, with a budget, once on the first ``Event.BEFORE_FORWARD`` (the plan is
    measured on the first microbatch, before it is trained on).

    Where the FSDP config has ``activation_checkpointing: true``, Composer wraps: the algorithm then marks modules with
    the ``_activation_checkpointing`` attribute that Composer reads, and wraps by itself only what Composer cannot
    (policies other than ``full``, offload, budgets).

    Args:
        **options: The fields of :class:`ActivationCheckpointingConfig`.
    """

    config_class = ActivationCheckpointingConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._selected: list[Selection] = []
        self._planned = self.config.budget is None
        self._plan_config: dict[str, Any] | None = None

    def match(self, event: Event, state: State) -> bool:
        """On INIT and AFTER_LOAD, and on the first BEFORE_FORWARD of a run with a budget."""
        if event == Event.BEFORE_FORWARD:
            return not self._planned
        return event in (Event.INIT, Event.AFTER_LOAD)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Select, wrap or plan."""
        if event == Event.INIT:
            self._select(state)
        elif event == Event.AFTER_LOAD:
            report = wrap_selected(state.model, self._selected, offload=self.config.offload)
            if self.config.budget is None:
                remember(state.model, self.config, True)
            if report.selected:
                log.info(str(report))
            if is_compiled(state.model) and (
                report.offload or any(s.policy == "offload" for s in report.selected)
            ):
                log.warning(
                    "%s: offloading breaks the graph of the compiled model at each module that it moves", KEY
                )
            logger.log_hyperparameters(
                {"activation_checkpointing/modules": len(list(checkpoint_wrappers(state.model)))}
            )
        elif self._plan_config is None:
            self._plan(state)
        else:
            self._apply_loaded(state)

    def state_dict(self) -> dict[str, Any]:
        """The plan, so that a resumed run keeps it: seconds measured anew could choose another."""
        return super().state_dict() | self._planned_for() | {"plan": self._plan_config}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a plan that was made for the same budget, compression and offload; otherwise plan anew."""
        ours = self._planned_for()
        if self.config.budget is not None and ours == {name: state.get(name) for name in ours}:
            self._plan_config = state.get("plan")

    def _planned_for(self) -> dict[str, Any]:
        return {name: getattr(self.config, name) for name in ("budget", "compression", "offload")}

    def _select(self, state: State) -> None:
        config = self.config
        packs = next((a.config for a in state.algorithms if isinstance(a, ActivationCompression)), None)
        refuse(Run(activation_checkpointing=config, activation_compression=packs))
        plan = applied(state.model, config, "checkpointed")
        if config.budget is not None:
            self._plan_config, self._planned = plan, plan is not None
        else:
            with warns_without_effect():
                self._selected = select(state.model, config.targets, config.policy, f"{KEY}.targets")
                if not self._selected:
                    log.warning("%s.targets: %r selects no block of this model", KEY, config.targets)
        fsdp = state.fsdp_config
        if fsdp is None or not fsdp.activation_checkpointing:
            return
        # MPT's activation_checkpointing_fn would choose every block; the attribute beats it, on every module.
        marked = set()
        if not config.offload and all(s.policy == "full" for s in self._selected):
            marked = {s.name for s in self._selected}
            if getattr(fsdp, "activation_checkpointing_reentrant", False):
                # Reentrant checkpointing repeats hooks and knows no keyword arguments; torch is dropping it.
                log.info("%s: set activation_checkpointing_reentrant to false in the FSDP config", KEY)
                fsdp.activation_checkpointing_reentrant = False
        for name, module in state.model.named_modules():
            module._activation_checkpointing = name in marked  # type: ignore[assignment]

    def _plan(self, state: State) -> None:
        from foundry_fp8.planning.memory.optimizer_state import optimizer_bytes
        from foundry_fp8.planning.memory.planner import apply_plan, plan_memory

        assert self.config.budget is not None
        model = without_ddp(state.model)  # DDP's reducer expects whole steps
        plan = plan_memory(
            model,
            loss_of_microbatch(state, model),
            budget=self.config.budget,
            offload=self.config.offload,
            compression=self.config.compression,
            optimizer_bytes=optimizer_bytes(state.optimizers),
            accumulates=accumulates(state),
        )
        self._planned, self._plan_config = True, plan.to_config()
        remember(model, self.config, self._plan_config)
        log.info("%s", plan)
        log.info("%s", apply_plan(model, plan))

    def _apply_loaded(self, state: State) -> None:
        assert self._plan_config is not None
        model = without_ddp(state.model)
        checkpoints = self._plan_config.get("activation_checkpointing")
        if checkpoints:
            selected = select(model, checkpoints["targets"], "full", f"{KEY}.targets")
            wrap_selected(model, selected, offload=self.config.offload)
        if "activation_compression" in self._plan_config:
            apply_activation_compression(model, **self._plan_config["activation_compression"])
        switch_off_cache(model)
        remember(model, self.config, self._plan_config)
        self._planned = True
        log.info("%s: the plan of the checkpoint is kept: %s", KEY, self._plan_config)


def accumulates(state: State) -> bool:
    """Whether a step may have several microbatches: unless the loader's batch is known to be one."""
    batch = getattr(state.dataloader, "batch_size", None)
    microbatch = state.device_train_microbatch_size
    return batch is None or state.auto_microbatching or microbatch is None or batch > microbatch


def loss_of_microbatch(state: State, model: Any) -> Callable[[], Tensor]:
    """A function that runs ``state.batch`` through ``model`` in the trainer's precision and returns the loss.

    The outputs, logits among them, live as long as the trainer's ``state.outputs``: through backward.
    """
    held: list[Any] = [None]

    def run() -> Tensor:
        with get_precision_context(state.precision, state.precision_config):
            held[0] = None
            held[0] = model(state.batch)
            loss = model.loss(held[0], state.batch)
        return loss if isinstance(loss, Tensor) else sum(loss)

    return run
