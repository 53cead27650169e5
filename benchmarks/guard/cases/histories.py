"""Histories of delayed scaling that are of another batch, run, source or rank."""

from __future__ import annotations

from case import Case, delayed
from mechanisms.base import every, grows, without
from mechanisms.histories import CompensatedBias, StaleHistory
from mechanisms.outliers import Activations

CASES = [
    Case(
        name="bad_batch", label="diverges", onset=80, ends=81, blocks=(0, 1), recipe=delayed(64),
        about="one batch with inputs of 4e5, which the amax history remembers for 64 steps, delayed",
        mechanism=lambda: Activations("*_proj", without(grows(80, 1.0, 4e5), 81)),
    ),
    Case(
        name="stale_history", label="diverges", onset=80, ends=81, blocks=(0, 1), recipe=delayed(256),
        about="FP8 state whose amaxes are 1.2e5 too large, as after loading another run's, delayed",
        mechanism=lambda: StaleHistory("*_proj", 80, 1.2e5),
    ),
    Case(
        name="two_sources", label="diverges", onset=80, seed=12, recipe=delayed(4), touched="*.fc2", model={"kind": "opt"},
        about="every 6th batch is of another source, whose activations grow 5 % a step and that a history of 4 forgets, OPT, delayed",
        mechanism=lambda: CompensatedBias("*.fc2", every(6, grows(80, 1.05, 2.0), 80), channel=21),
    ),
]  # fmt: skip
