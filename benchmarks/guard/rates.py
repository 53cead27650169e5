"""Learning rates that warm up and fall, which more than one half of the labelled runs has."""

from __future__ import annotations

import math


def cosine(peak: float, steps: int, warm: int = 20, last: float = 0.0):
    """A rate that warms up and falls as a cosine to ``last`` times its peak."""
    return lambda step: (
        peak
        * min(1.0, (step + 1) / warm)
        * (last + (1 - last) * (0.5 + 0.5 * math.cos(math.pi * step / steps)))
    )


def linear(peak: float, steps: int, warm: int = 20):
    """A rate that warms up and falls linearly to zero."""
    return lambda step: peak * min((step + 1) / warm, (steps - step) / (steps - warm))
