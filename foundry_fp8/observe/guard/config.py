"""The options of the divergence guard, and the events that it reports."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Literal

from foundry_fp8.config import Config, Positive, PositiveNumber, not_empty

__all__ = ["KEY", "MODEL", "Event", "GuardConfig"]

KEY = "callbacks.divergence_guard"
MODEL = "model"
"""The ``unit`` of an event that is about the whole model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig(Config):
    """The options of the guard in every trainer."""

    key = KEY

    interval: Positive = 20
    """Batches between two measurements. After a measurement above a limit, or a jump of the loss, the next batches are measured too."""
    rows: Positive = 1
    """Sequences of the batch that each rank measures on."""
    loss_limit: PositiveNumber = 0.0075
    """The largest rise of the loss by FP8, as a share of the loss."""
    gradient_limit: PositiveNumber = 0.3
    """The largest relative error that FP8 may cause in the gradient of a transformer block."""
    actions: Annotated[Sequence[Literal["warn", "demote", "stop"]], not_empty] = ("demote",)
    """What an alarm does besides being logged, one or more of: ``warn`` (nothing else), ``demote``, ``stop`` (end the run)."""
    finer: bool = True
    """Try a finer recipe (current after delayed, block after current) before high precision."""
    passes: Positive = 48
    """The most passes (forward and backward) in one batch to find the layers at fault; after them neighbours are demoted together."""
    quiet_batches: Positive = 200
    """Batches over which all demoted layers must measure well within the limits in FP8 before they return to it. Doubles with each return."""


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that the guard found or did; ``batch`` counts the batches finished before it."""

    batch: int
    unit: str
    """A layer, a block (``layer_003``), or ``model``."""
    action: Literal["alarm", "demote", "return", "stop"]
    signal: str = ""
    """What was above its limit (``loss``, ``gradient``), or the change of recipe (``delayed -> current``)."""
    value: float = math.nan
    """Of an alarm: the rise of the loss (a share of it) or the gradient's relative error; ``threshold`` is its limit."""
    threshold: float = math.nan
    detail: str = ""

    def __str__(self) -> str:
        what = " ".join(part for part in (self.action, self.signal) if part)
        return f"batch {self.batch}, {self.unit}: {what}{self.detail and f' ({self.detail})'}"
