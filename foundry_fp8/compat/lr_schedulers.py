"""Whether a scheduler was made for an optimizer, and the schedulers inside of one.

Cause: torch has no public way to ask; it marks the step that it wraps, and ``SequentialLR`` and ``ChainedScheduler`` keep theirs to themselves
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/optim/lr_scheduler.py). Remove when it has.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["has_scheduler", "schedulers_in"]


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether one was made for it."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def schedulers_in(scheduler: Any) -> list[Any]:
    """Those that it calls."""
    return list(getattr(scheduler, "_schedulers", ()))
