"""Whether what rounding costs of the loss is more than a run is to bear, or soon will be.

What one linear or attention costs says little: it is a share of the loss, and all that is asked is how much the loss loses altogether. So none is to blame for it while
all together cost less than :data:`BUDGET`. A budget that is spent has been felt, though. What grows has to be left before, so what counts is what they will
cost in :data:`AHEAD` observations, if they go on growing as in the last :data:`OVER`.

The gradient is of the loss that is trained, whose tokens may weigh more than they do in the loss that is told (rewards, advantages, rare words): costs go with
the square of that weight. Then the gradients of every block have grown, which those of a layer that rounding harms alone have not. And where they seem to cost
too much from the start on, gradients are of another unit than the loss (a sum, a scale that nobody told of), and nothing can be said.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from foundry_fp8.observe.divergence.change_point import Change, ChangePoint
from foundry_fp8.observe.divergence.resuming import taken

__all__ = ["BUDGET", "SAFE", "CostWatch"]

BUDGET = 7.5e-3
"""Share of the loss that rounding may cost: what a run in FP8 may end above high precision, and a quarter less."""
SAFE = BUDGET / 2
"""What comes back to FP8 may make them cost; what costs more in a run that is well is of another unit."""
AHEAD, OVER = 2, 4
"""Observations in turn."""
GROWTH = 4.0
"""What they are believed to grow by, at most."""
WEIGHT = 2.0
"""Gradients vary by that much in any run."""
JUMP = math.log(8.0)
"""Bounds what one batch moves a level by."""


class CostWatch:
    """What all linears and attentions cost, of late.

    Attributes:
        weight: By what the last costs were divided.
        ahead: What all are going to cost, by weight.
    """

    def __init__(self) -> None:
        self._past: deque[float] = deque(maxlen=OVER + 1)
        self._level = ChangePoint(Change(jump=JUMP, drift=JUMP))
        """Of the logarithm of what all cost."""
        self._levels: dict[str, ChangePoint] = {}
        """Of that of each block's gradient norm."""
        self._before = math.inf
        self.weight = 1.0
        self.ahead = math.inf

    @property
    def known(self) -> bool:
        """Whether costs are in units of the loss."""
        return self._level.reference is not None and math.exp(self._level.reference) < SAFE

    @property
    def cheap(self) -> bool:
        """Whether it is known that they are not going to cost :data:`BUDGET`, by one of two looks."""
        return self.known and min(self.ahead, self._before) < BUDGET

    def observe(self, cost: float, gradients: Mapping[str, float], *, due: bool) -> None:
        """Take one observation.

        Args:
            cost: Of all together, as a share of the loss.
            gradients: The gradient's norm, by block.
            due: Whether it is its turn; if not, it teaches nothing.
        """
        self.weight = max(1.0, self._grown(gradients, due) / WEIGHT) ** 2
        cost /= self.weight
        grown = 1.0
        if len(self._past) >= OVER + (not due) and (past := self._past[-OVER - (not due)]) > 0:
            grown = min(GROWTH, max(1.0, (cost / past) ** (AHEAD / OVER)))
        self._before, self.ahead = self.ahead, cost * grown
        if due:
            self._past.append(cost)
            if 0 < cost < math.inf:
                self._level.observe(math.log(cost), restart=False)

    def _grown(self, gradients: Mapping[str, float], due: bool) -> float:
        """By how much the gradients of every block have grown over the least that they were."""
        grown = []
        for unit, norm in gradients.items():
            if norm > 0 and math.isfinite(norm):
                level = self._levels.setdefault(unit, ChangePoint(Change(jump=JUMP, drift=JUMP)))
                if due:
                    level.observe(math.log(norm), restart=False)
                if level.reference is not None:
                    grown.append(norm / math.exp(level.reference))
        return min(grown, default=1.0)

    def counted(self, values: Mapping[tuple[str, str, str], float], total: float, limit: float = BUDGET) -> dict[tuple[str, str, str], float]:  # fmt: skip
        """The same with what each costs by weight, or with nothing for it while the total is below the limit, or its unit is not known."""
        part = 1 / self.weight if self.known and total >= limit else 0.0
        return {where: value * part if where[2] == "loss_cost" else value for where, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Numbers only."""
        levels = {unit: level.state_dict() for unit, level in self._levels.items()}
        return {
            "past": list(self._past),
            "ahead": self.ahead,
            "level": self._level.state_dict(),
            "levels": levels,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Take back what :meth:`state_dict` gave; the names that one of both lacks, which start anew."""
        state, differs = taken(saved, self.state_dict())
        self._past, self.ahead = deque(state["past"], maxlen=OVER + 1), state["ahead"]
        differs += [f"level/{name}" for name in self._level.load_state_dict(state["level"])]
        lacks: set[str] = set()
        for unit, of_level in state["levels"].items():
            self._levels[unit] = ChangePoint(Change(jump=JUMP, drift=JUMP))
            lacks.update(self._levels[unit].load_state_dict(of_level))
        return differs + [f"levels/{name}" for name in sorted(lacks)]
