"""Figures of small panels, one a metric: MFU, FP8's health, the guard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from foundry_fp8.report.comparison import Row
from foundry_fp8.report.style import add_legend, mark_non_finite, new_figure, run_style, step_axis

__all__ = ["fp8_health", "guard", "mfu"]

Panel = tuple[str, str, float]
"""Key of the metric, label, factor."""
_HEALTH: list[Panel] = [
    (f"fp8/{stat}/{operand}/worst", f"{label}: {operand}", scale)
    for stat, label, scale in (
        ("saturated", "saturated (%)", 100.0),
        ("flushed", "flushed to zero (%)", 100.0),
        ("sqnr_db", "SQNR (dB)", 1.0),
    )
    for operand in ("x", "w", "dy")
]
_GUARD: list[Panel] = [
    ("fp8_error/loss_gap", "loss in FP8 above high precision (%)", 100.0),
    ("fp8_error/gradient/worst", "gradient's error, worst block (%)", 100.0),
    ("guard/alarms", "alarms so far", 1.0),
    ("guard/demoted_layers", "demoted layers", 1.0),
]
_COUNTS = frozenset({"guard/alarms", "guard/demoted_layers"})
"""Metrics that keep their value until the next one: drawn as steps."""


def mfu(rows: Sequence[Row]) -> Figure | None:
    """MFU, HFU where a run recomputes, and the peak they are measured against."""
    panels = [
        ("mfu/mfu", "MFU (%)", 100.0),
        ("mfu/hfu", "HFU: with recompute (%)", 100.0),
        ("mfu/tflops_per_device", "TFLOP/s of a device", 1.0),
        ("mfu/effective_peak", "effective peak (TFLOP/s)", 1.0),
    ]
    recomputed = any(_recomputes(row) for row in rows)
    return _draw(rows, [panel for panel in panels if panel[0] != "mfu/hfu" or recomputed], columns=2)


def _recomputes(row: Row) -> bool:
    mfu, hfu = (row.run.metrics.get(key) for key in ("mfu/mfu", "mfu/hfu"))
    if mfu is None or hfu is None:
        return hfu is not None
    return len(mfu.values) != len(hfu.values) or not np.allclose(mfu.values, hfu.values, equal_nan=True)


def fp8_health(rows: Sequence[Row]) -> Figure | None:
    """The worst linear's saturation, underflow and SQNR for each operand over the run."""
    return _draw(rows, _HEALTH, columns=3)


def guard(rows: Sequence[Row]) -> Figure | None:
    """What the divergence guard measures, its alarms, and how many layers it has demoted."""
    return _draw(rows, _GUARD, columns=2)


def _draw(rows: Sequence[Row], panels: Sequence[Panel], columns: int) -> Figure | None:
    """A panel a metric that any run has, one line a run; a legend once for all."""
    shown = [panel for panel in panels if any(panel[0] in row.run.metrics for row in rows)]
    if not shown:
        return None
    columns = min(columns, len(shown))
    lines = -(-len(shown) // columns)
    figure = new_figure(0.3 + 1.6 * lines)
    kinds = [row.run.recipe for row in rows]
    for position, (key, label, scale) in enumerate(shown, start=1):
        axes = figure.add_subplot(lines, columns, position)
        axes.set_title(label)
        for index, row in enumerate(rows):
            series = row.run.metrics.get(key)
            if series is None:
                continue
            style = run_style(kinds, index, len(series.steps))
            drawn = "steps-post" if key in _COUNTS else "default"
            axes.plot(series.steps, scale * series.values, drawstyle=drawn, label=row.run.name, **style)
            mark_non_finite(axes, series.steps, series.values, style["color"])
        if key in _COUNTS:
            axes.set_ylim(-0.1, max(1.1, axes.get_ylim()[1]))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        step_axis(axes)
        if position <= len(shown) - columns:
            axes.set_xlabel("")
    add_legend(figure)
    return figure
