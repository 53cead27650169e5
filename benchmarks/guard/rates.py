"""Learning rates that warm up, and stay or fall."""

from __future__ import annotations

import math
from collections.abc import Callable

Rate = Callable[[int], float]


def level(peak: float, warm: int = 20) -> Rate:
    """Stays at ``peak``."""
    return lambda step: peak * min(1.0, (step + 1) / warm)


def cosine(peak: float, steps: int) -> Rate:
    """Falls as a cosine to zero."""
    return lambda step: peak * min(1.0, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def linear(peak: float, steps: int) -> Rate:
    """Falls linearly to zero."""
    return lambda step: peak * min((step + 1) / 20, (steps - step) / (steps - 20))
