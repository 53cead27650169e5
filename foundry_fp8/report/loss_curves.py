"""The figure of the loss: curves, and how far each is from high precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foundry_fp8.report.comparison import Row
from foundry_fp8.report.style import INK, add_legend, mark_non_finite, new_figure, run_style, step_axis

__all__ = ["loss", "smooth"]

_SMOOTH_SHARE = 0.02


def smooth(values: np.ndarray, share: float = _SMOOTH_SHARE) -> np.ndarray:
    """Mean of each point and those before it, ``share`` of the run in all ([n] to [n]); non-finite values stay visible.

    The first points have fewer before them and are means of fewer.
    """
    window = max(1, round(len(values) * share))
    if window >= len(values):
        window = max(1, len(values))
    # Not a cumulative sum over the run: that would carry one NaN to its end.
    head = np.cumsum(values[: window - 1]) / np.arange(1, window)
    return np.concatenate([head, np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=-1)])


def loss(rows: Sequence[Row]) -> Figure | None:
    """Loss curves on top of each other, and below them the difference from high precision."""
    shown = [(index, row) for index, row in enumerate(rows) if len(row.run.step)]
    if not shown:
        return None
    kinds = [row.run.recipe for row in rows]
    paired = any(row.baseline is not None and len(row.baseline.step) for _, row in shown)
    figure = new_figure(4.0 if paired else 2.8)
    heights = [2.2, 1.0][: 1 + paired]
    above, *below = figure.subplots(1 + paired, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    percents = []
    for index, row in shown:
        run = row.run
        style = run_style(kinds, index, len(run.step))
        above.plot(run.step, run.loss, color=style["color"], linewidth=0.5, alpha=0.3)
        above.plot(run.step, smooth(run.loss), label=run.name, **style)
        mark_non_finite(above, run.step, run.loss, style["color"])
        if row.baseline is None:
            continue
        steps, here, there = np.intersect1d(run.step, row.baseline.step, return_indices=True)
        if len(steps):
            percents.append(100 * (smooth(run.loss[here]) / smooth(row.baseline.loss[there]) - 1))
            below[0].plot(steps, percents[-1], **run_style(kinds, index, len(steps)))
    above.set_ylabel("training loss")
    first, last = min(row.run.step[0] for _, row in shown), max(row.run.step[-1] for _, row in shown)
    above.set_xlim(first, max(last, first + 1))
    _robust_limits(above, [row.run.loss for _, row in shown])
    for axes in below:
        axes.axhline(0, color=INK, linewidth=1, zorder=1.5)
        axes.set_ylabel("% loss higher")
        _difference_limits(axes, percents)
    step_axis(figure.axes[-1])
    add_legend(figure)
    return figure


def _robust_limits(axes: Axes, curves: Sequence[np.ndarray]) -> None:
    """Limits from what is finite; a divergence that leaves the ordinary range by far is cut at the top."""
    values = np.concatenate(curves)
    values = values[np.isfinite(values)]
    if not len(values):
        return
    low, high = float(values.min()), float(values.max())
    start = max((float(curve[0]) for curve in curves if len(curve) and np.isfinite(curve[0])), default=high)
    if high > 2 * start > 0:
        high = 1.3 * start
    margin = 0.04 * (high - low) or 0.5
    axes.set_ylim(low - margin, high + margin)


def _difference_limits(axes: Axes, curves: Sequence[np.ndarray]) -> None:
    """Limits that a divergence at the end of one run does not stretch until the others look flat."""
    values = np.concatenate([np.zeros(1), *curves])
    values = values[np.isfinite(values)]
    usual = max(4 * float(np.quantile(np.abs(values), 0.8)), 0.1)
    low, high = max(float(values.min()), -usual), min(float(values.max()), usual)
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
