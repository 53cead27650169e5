"""Whether a run's loss is as good as its baseline's, as far as the noise of the run lets one say."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from foundry_fp8.report.run import FINAL_SHARE, Run

__all__ = ["LEAST_BAND_PERCENT", "Judgement", "judge", "kurtosis_lead", "noise_band"]

LEAST_BAND_PERCENT = 0.25
"""Of noise that lasts over many steps, which one run does not show. Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437,
section 3.3: FP8's relative loss error stays below 0.25 %, "well within the acceptable range of training randomness"."""
KURTOSIS_FACTOR = 2.0
"""Kurtosis so many times the highest of the baseline is outside of its range (a convention)."""
DIVERGED_PERCENT = 10.0
"""A loss that ends so far above its own lowest, its baseline's not, has diverged (a convention)."""
FEWEST_STEPS = 4
MOST_BAND_PERCENT = 5.0
"""Within a wider one nothing can be said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """One run against its baseline."""

    outcome: Literal["fine", "above", "diverged", "unknown"]
    step: int | None = None
    """Where it diverged."""
    percent: float = math.nan
    """How much higher its loss is, over the last 10 % of the steps compared."""
    band: float = math.nan
    """What of that may be noise: :func:`noise_band`, or :data:`LEAST_BAND_PERCENT` where that is more."""
    compared: int = 0
    """Steps whose loss both logged, ..."""
    of: int = 0
    """... and those of the baseline."""
    why: str = ""
    """That nothing can be said."""


def judge(run: Run, baseline: Run) -> Judgement:
    """Compare the losses.

    A run has diverged if it logged a loss that is not finite, or ends more than 10 % above its own lowest while its
    baseline does not. Otherwise its loss is fine if it is not above the baseline's by more than the noise.
    """
    at, of = run.step[run.has_loss], baseline.step[baseline.has_loss]
    steps, here, there = np.intersect1d(at, of, return_indices=True)
    mine, theirs = run.loss[run.has_loss][here], baseline.loss[baseline.has_loss][there]
    found = Judgement(outcome="unknown", compared=len(steps), of=len(of))
    bad = at[~np.isfinite(run.loss[run.has_loss])]
    if len(bad):
        return dataclasses.replace(found, outcome="diverged", step=int(bad[0]))
    if not np.isfinite(theirs).all():
        first = steps[~np.isfinite(theirs)][0]
        why = f"the loss of {baseline.name}, which it is compared with, is not finite in step {first}"
        return dataclasses.replace(found, why=why)
    if len(steps) < FEWEST_STEPS:
        why = (
            f"{run.name} and {baseline.name} have the loss of {len(steps)} steps in common, which is too few"
        )
        return dataclasses.replace(found, why=why)
    window = max(1, round(len(steps) * FINAL_SHARE))
    band = max(noise_band(theirs, window), LEAST_BAND_PERCENT)
    mine, theirs = (np.convolve(losses, np.full(window, 1 / window), "valid") for losses in (mine, theirs))
    if not (theirs > 0).all():
        return dataclasses.replace(found, why=f"the loss of {baseline.name} is not above zero")
    higher = 100 * (mine / theirs - 1)  # of running means
    percent = float(higher[-1])
    found = dataclasses.replace(found, percent=percent, band=band)
    risen, usual = (100 * float((means[-1] - means.min()) / theirs[-1]) for means in (mine, theirs))
    if percent > band and risen > max(DIVERGED_PERCENT, 2 * band, 2 * usual):
        within = np.flatnonzero(higher <= band)
        first = int(within[-1]) + 1 if len(within) else 0
        return dataclasses.replace(found, outcome="diverged", step=int(steps[first + window - 1]))
    if band > MOST_BAND_PERCENT and abs(percent) <= band:
        why = f"the noise of {baseline.name} (band {band:.2g} %) hides a difference of {percent:+.2f} %"
        return dataclasses.replace(found, why=why)
    return dataclasses.replace(found, outcome="fine" if percent <= band else "above")


def kurtosis_lead(run: Run, baseline: Run, diverged: int) -> float:
    """How many batches before step ``diverged``, where the loss did, kurtosis left the range of ``baseline`` and stayed outside.

    Of all layers that both logged, the earliest. Negative if the loss went first; NaN where no kurtosis was logged or none left.
    """
    first = math.inf
    usual = baseline.matching("kurtosis")
    for key, series in run.matching("kurtosis").items():
        if key in usual and len(series.steps):
            highest = KURTOSIS_FACTOR * float(np.nanmax(usual[key].values, initial=0.0))
            inside = np.flatnonzero(series.values <= highest)  # NaN is outside
            outside = series.steps[int(inside[-1]) + 1 if len(inside) else 0 :]
            first = min(first, int(outside[0])) if len(outside) else first
    return diverged - first if math.isfinite(first) else math.nan


def noise_band(losses: np.ndarray, window: int) -> float:
    """By how many percent two runs that are alike but for noise may differ in the mean of ``window`` steps (95 %).

    The model: a loss is a smooth trend times ``1 + e``, with ``e`` independent at each step and in each run, of
    standard deviation ``sigma``. The difference of two means over ``n`` steps has ``sigma sqrt(2 / n)``; the band is
    two of these. ``sigma`` is that of the losses around their trend: the second difference ``l[t-1] - 2 l[t] + l[t+1]``
    of a straight trend is noise alone, of variance ``(1 + 4 + 1) sigma^2``. Of its absolute value the median is taken
    (0.6745 standard deviations of a Gaussian), which a spike of the loss does not move.

    Runs on the same batches share a part of the noise and differ by less. Noise that lasts over many steps is not in it.

    Source: Gasser, Sroka, Jennen-Steinmetz, Residual variance and residual pattern in nonlinear regression,
    Biometrika 73 (1986), for equidistant points.

    Args:
        losses: [n] of the baseline, at the steps compared; the last half of them counts.
        window: Steps in a mean.
    """
    late = losses[-max(len(losses) // 2, min(len(losses), 10)) :]
    sigma = float(np.median(np.abs(np.diff(late, 2)))) / 0.6745 / math.sqrt(6)
    return 100 * 2 * math.sqrt(2 / window) * sigma / (float(np.abs(late).mean()) or math.inf)
