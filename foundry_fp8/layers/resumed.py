"""Says once that a run goes on whose FP8 state nobody loaded: its optimizer has taken steps, and the amax histories are empty."""

from __future__ import annotations

import logging
import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from foundry_fp8.layers.delayed_scaling import DelayedScalingState

__all__ = ["watch_first_step"]

log = logging.getLogger(__name__)


class _State(Protocol):
    """Of the delayed recipe; ``answered``: its checkpoint's state was loaded, or is known to be missing."""

    answered: bool

    @property
    def delayed(self) -> DelayedScalingState | None: ...


_watched: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_State]] = weakref.WeakKeyDictionary()
"""Models that have not been stepped yet, with their states."""
_hooks: list[Any] = []
"""The hooks on all optimizers: torch takes none away while it runs."""
_stepped_before: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
"""Optimizers that are inside a step, and whether they had taken one before it."""


def watch_first_step(model: nn.Module, state: _State) -> None:
    """Look at the first optimizer step after a training forward of ``model``; warn if it is not the optimizer's first.

    Args:
        model: The root that is called in training.
        state: Its FP8 state; nothing is said once it is ``answered``.
    """
    _watched[model] = weakref.ref(state)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


@torch.compiler.disable
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _watched:
        _stepped_before[optimizer] = _has_stepped(optimizer)
        _look(optimizer)


@torch.compiler.disable
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A step with a closure (Composer's) runs the forward inside of it.
    if _watched and optimizer in _stepped_before:
        _look(optimizer)


def _look(optimizer: Optimizer) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model, state_of in list(_watched.items()):
        state = state_of()
        if state is None or state.answered or state.delayed is None:
            del _watched[model]
            continue
        if not any(id(p) in stepped for p in model.parameters()):
            continue
        # A checkpoint library may step an optimizer on zeros, to make its states, before anything has run.
        if not bool(torch.any(state.delayed.amax_history)):
            continue
        del _watched[model]
        if _stepped_before[optimizer]:
            log.warning(
                "The optimizer has taken steps before, and no FP8 state was loaded: amax histories begin empty, so this run "
                "does not go on as the one that it resumes. Save and load foundry_fp8.training_state(model) beside the model. "
                "Where FP8 begins here, nothing is lost."
            )


def _has_stepped(optimizer: Optimizer) -> bool:
    """Whether its states are of earlier steps."""
    return any(
        bool(state["step"] > 0) if "step" in state else bool(state) for state in optimizer.state.values()
    )
