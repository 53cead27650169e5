"""When a noisy number has gone up for good: Page's cumulative sum at two time scales, with restarts.

With ``y_t`` the observations, ``r`` a reference and ``d`` the change that matters, the sum

    ``G_t = max(0, G_{t-1} + (y_t - r - d / 2))``

stays near zero while the mean of ``y`` is below ``r + d / 2`` and grows by ``d / 2`` an observation once it is at ``r + d``.
Two such sums run side by side: a *fast* one on the observations themselves, which takes two of them to raise the alarm, and a
*slow* one on their exponential mean, for a smaller change that has lasted. The reference is the lowest that this mean has been
since the last restart: it follows every improvement, and no climb, however slow. An alarm restarts it at the level that raised
the alarm, so a level that shifts and stays is told once, and a climb once for every ``d`` that it climbs.

Nothing is left out of what is learned: the noise is that of successive differences, of which a shift is one among many and a
drift hardly any, and one observation moves the sum and the mean by a bounded step only.

Source:
    The sum: Page, "Continuous inspection schemes", Biometrika 41 (1954), with the bounded step of Lucas and Crosier, "Robust
    CUSUM", Communications in Statistics 11 (1982). Restarting it after each change: Basseville and Nikiforov, "Detection of
    Abrupt Changes" (1993), 2.2. Noise from successive differences: Rice, Annals of Statistics 12 (1984), as a median.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from foundry_fp8.observe.divergence.resuming import taken

__all__ = ["WARMUP", "Change", "ChangePoint"]

WARMUP = 8
"""Observations from which the first reference is made."""
MEMORY = 32
"""Differences that the estimate of the noise holds."""
RATE = 1 / 8
"""Weight of an observation in the exponential mean."""
FAST_SIGMAS, SLOW_SIGMAS = 6.0, 4.0
"""A change that is less than so many standard deviations of one observation is none."""
SLOW_OBSERVATIONS = 6
"""Observations that the slow sum takes for a change of exactly the size that matters."""
BOUND = 0.6
"""What one observation adds to the fast sum at most, of the change that matters; less than 1, so that it takes two."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """The sizes that matter, in the unit of the observations."""

    jump: float
    """Of a change that the fast sum is to find."""
    drift: float
    """Of one that the slow sum is to find."""


class ChangePoint:
    """The two sums over one series.

    Args:
        change: What matters.
        ceiling: Above this it has gone up, whatever the past and the noise.
        bound: The reference is never above this, and is this until it has been learned; by default, ``jump`` below the ceiling.

    Attributes:
        reference: The level that observations are compared with; ``None`` while it is not known.
        noise: Standard deviation of one observation around its level; 0 while it is not known.
    """

    def __init__(self, change: Change, *, ceiling: float | None = None, bound: float | None = None) -> None:
        self._change = change
        self._ceiling = ceiling
        self._bound = ceiling - change.jump if bound is None and ceiling is not None else bound
        self._lowest: float | None = None
        self._mean: float | None = None
        self._last: float | None = None
        self._differences: deque[float] = deque(maxlen=MEMORY)
        self.noise = 0.0
        self._seen = 0
        self._fast = self._slow = 0.0

    @property
    def reference(self) -> float | None:
        """See the class."""
        if self._seen < WARMUP or self._lowest is None:
            return self._bound
        return self._lowest if self._bound is None else min(self._lowest, self._bound)

    @property
    def jump(self) -> float:
        """How far above the reference an observation counts as gone up."""
        wide = max(self._change.jump, FAST_SIGMAS * self.noise)
        if self._ceiling is None or (reference := self.reference) is None:
            return wide
        return min(wide, max(self._change.jump, self._ceiling - reference))

    @property
    def evidence(self) -> float:
        """How much of an alarm has come together: 0 for none, 1 raises it."""
        return max(self._fast / self.jump, self._slow / self._slow_limit)

    @property
    def fast(self) -> float:
        """The same of the fast sum alone."""
        return self._fast / self.jump

    def observe(self, y: float, *, restart: bool = True) -> bool:
        """Take one finite observation; true if it raises the alarm.

        Args:
            y: The observation.
            restart: Whether an alarm takes the present level for the new reference; otherwise it is raised again while the
                level stays.
        """
        last, self._last = self._last, y
        if last is not None:
            self._differences.append(abs(y - last))
            self._estimate_noise()
        self._learn(y)
        reference = self.reference
        if reference is None:
            return False
        assert self._mean is not None
        step = y - reference - self.jump / 2
        self._fast = max(0.0, self._fast + min(step, BOUND * self.jump))
        if self._seen >= WARMUP:
            drift = max(self._change.drift, SLOW_SIGMAS * self.noise)
            self._slow = max(0.0, self._slow + self._mean - reference - drift / 2)
        if self._fast < self.jump and self._slow < self._slow_limit:
            return False
        # Both are of finite steps, so the last two observations are what the alarm is about.
        self._fast = self._slow = 0.0
        if restart and self._seen >= WARMUP:
            self._mean = self._lowest = y if last is None else (y + last) / 2
        return True

    @property
    def _slow_limit(self) -> float:
        drift = max(self._change.drift, SLOW_SIGMAS * self.noise)
        return SLOW_OBSERVATIONS * drift / 2

    def _estimate_noise(self) -> None:
        if len(self._differences) >= WARMUP - 1:
            self.noise = 1.4826 * statistics.median(self._differences) / math.sqrt(2)

    def _learn(self, y: float) -> None:
        self._seen += 1
        if self._seen <= WARMUP or self._mean is None:
            mean = y if self._mean is None else self._mean + (y - self._mean) / self._seen
            self._mean = self._lowest = mean
            return
        # A spike is bounded upwards only: an improvement is taken as it is.
        self._mean += RATE * min(y - self._mean, self.jump)
        assert self._lowest is not None
        self._lowest = min(self._lowest, self._mean)

    def state_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return {
            "bound": self._bound,
            "lowest": self._lowest,
            "mean": self._mean,
            "last": self._last,
            "differences": list(self._differences),
            "seen": self._seen,
            "fast": self._fast,
            "slow": self._slow,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Take back what :meth:`state_dict` gave, all or nothing; the names that one of both lacks: with any, it starts anew."""
        state, differs = taken(saved, self.state_dict())
        if differs:
            return differs
        self._bound = state["bound"]
        self._lowest, self._mean, self._last = state["lowest"], state["mean"], state["last"]
        self._differences.clear()
        self._differences.extend(state["differences"])
        self._estimate_noise()
        self._seen, self._fast, self._slow = state["seen"], state["fast"], state["slow"]
        return []
