"""What the guard sees, what it can move, and what it tells."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

__all__ = ["MODEL", "Event", "Observed", "Rungs"]

MODEL = "model"
"""Where the loss is measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rungs:
    """What one target can run.

    Attributes:
        unit: The block that it is in.
        recipes: Names, from the configured one to ``high_precision``.
    """

    unit: str
    recipes: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """One observation, the same on every rank.

    Attributes:
        loss: Of the batch.
        signs: ``(block, signal)`` -> value.
        damage: ``(target, operand, signal)`` -> value, of what runs in FP8.
        shadow: The same, of what the rung above would do to a demoted target.
        amax: ``(target, operand)`` -> amax.
        loss_cost: What rounding costs at all linears and attentions, as a share of the loss.
        shadow_cost: What the rung above would add to that.
    """

    loss: float
    signs: Mapping[tuple[str, str], float]
    damage: Mapping[tuple[str, str, str], float]
    shadow: Mapping[tuple[str, str, str], float]
    amax: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    loss_cost: float = 0.0
    shadow_cost: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What was decided in one batch about one place.

    Attributes:
        unit: A module's name, a block (``layer_003``, ``outside``) or ``model``.
        signal: What raised the alarm (``flushed of x``), or the move (``delayed -> current``).
        why: Of a move: what it is for. Of an alarm: what it is, where a value and its threshold do not say it.
    """

    batch: int
    unit: str
    signal: str
    action: Literal["alarm", "renew", "demote", "promote", "checkpoint", "stop"]
    value: float = math.nan
    threshold: float = math.nan
    why: str = ""

    @property
    def detail(self) -> str:
        """What raised the alarm, or why it was moved, in words."""
        if self.action != "alarm" or self.why:
            return self.why
        # The sums see what no single value does: a slow rise stays below the threshold of a jump.
        rose = "above" if not self.value <= self.threshold else "risen for long, though below"
        return f"{self.value:.4g}, {rose} {self.threshold:.4g}"

    def __str__(self) -> str:
        what = " ".join(part for part in (self.action, self.signal) if part)
        return f"batch {self.batch}, {self.unit}: {what}{self.detail and f' ({self.detail})'}"
