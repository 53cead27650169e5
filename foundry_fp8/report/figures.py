"""The figures of a report. Each takes the runs and returns a figure, or ``None`` where no run logged what it shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from foundry_fp8.report.comparison import Row
from foundry_fp8.report.figures_across import bars, sizes, speed, tasks
from foundry_fp8.report.heat_maps import GRADIENT_ERROR, KURTOSIS, draw
from foundry_fp8.report.run import Series
from foundry_fp8.report.style import INK, WIDTH, label_ends, new_figure, run_style

__all__ = ["COUNTS", "FIGURES", "LINE_PANELS", "FigureSpec", "mfu_panels", "smooth"]

_SMOOTH_SHARE = 0.02
LINE_PANELS: dict[str, list[tuple[str, str, float]]] = {
    "fp8-health": [
        (f"fp8/{stat}/{operand}/worst", f"{label}: {operand}", scale)
        for stat, label, scale in (
            ("saturated", "saturated (%)", 100.0),
            ("flushed", "flushed to zero (%)", 100.0),
            ("sqnr_db", "SQNR (dB)", 1.0),
        )
        for operand in ("x", "w", "dy")
    ],
    "guard": [
        ("fp8_error/loss_gap", "loss in FP8 above high precision (%)", 100.0),
        ("fp8_error/gradient/worst", "gradient's error, worst block (%)", 100.0),
        ("guard/alarms", "alarms so far", 1.0),
        ("guard/demoted_layers", "demoted layers", 1.0),
    ],
}
"""Of figures that are panels of lines: key of the metric, label, factor."""
COUNTS = frozenset({"guard/alarms", "guard/demoted_layers"})
"""Metrics that keep their value until the next one: drawn as steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FigureSpec:
    """A figure, what it is called and what a reader must know about it."""

    name: str
    """File name without suffix, and anchor in the page."""
    title: str
    caption: str
    draw: Callable[[Sequence[Row]], Figure | None]
    without: str
    """What to do to get it, shown where no run has the data."""


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
    shown = [row for row in rows if len(row.run.step)]
    if not shown:
        return None
    paired = [row for row in shown if row.baseline is not None and len(row.baseline.step)]
    figure = new_figure(WIDTH, 5.6 if paired else 3.9)
    grid = figure.add_gridspec(2 if paired else 1, 1, height_ratios=[2.2, 1] if paired else [1])
    above = figure.add_subplot(grid[0])
    ends = []
    kinds = [row.run.recipe for row in rows]
    for index, row in enumerate(rows):
        run = row.run
        if not len(run.step):
            continue
        curve = smooth(run.loss)
        style = run_style(kinds, index, len(curve))
        above.plot(run.step, run.loss, color=style["color"], linewidth=0.6, alpha=0.25)
        above.plot(run.step, curve, **style)
        _mark_non_finite(above, run.step, run.loss, style["color"])
        ends.append((run.name, *_last_finite(run.step, curve), style["color"]))
    above.set_ylabel("training loss")
    above.set_xlim(min(row.run.step[0] for row in shown), max(row.run.step[-1] for row in shown))
    _robust_limits(above, [row.run.loss for row in shown])
    below = above
    if paired:
        below = figure.add_subplot(grid[1], sharex=above)
        above.tick_params(labelbottom=False)
        differences = []
        percents = []
        for index, row in enumerate(rows):
            if row.baseline is None or not len(row.run.step):
                continue
            steps, here, there = np.intersect1d(row.run.step, row.baseline.step, return_indices=True)
            if not len(steps):
                continue
            percent = 100 * (smooth(row.run.loss[here]) / smooth(row.baseline.loss[there]) - 1)
            style = run_style(kinds, index, len(percent))
            below.plot(steps, percent, **style)
            percents.append(percent)
            differences.append((row.run.name, *_last_finite(steps, percent), style["color"]))
        below.axhline(0, color=INK, linewidth=1.2)
        below.set_ylabel("% loss higher")
        _difference_limits(below, percents)
        _draw_then_label(figure, below, differences)
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    _draw_then_label(figure, above, ends)
    return figure


def memory(rows: Sequence[Row]) -> Figure | None:
    """Largest memory of each run: of the device where Composer's memory_monitor logged it, else of the process."""
    device = [
        (i, row.run.name, _peak(row.run.metrics.get("memory/peak_reserved_mem")))
        for i, row in enumerate(rows)
    ]
    # GB, as Composer's memory_monitor logs.
    host = [
        (i, row.run.name, float(np.nanmax(row.run.host_peak_bytes, initial=0.0)) / 1e9)
        for i, row in enumerate(rows)
    ]
    panels = [
        (label, [bar for bar in found if np.isfinite(bar[2]) and bar[2] > 0])
        for label, found in (
            ("device, peak reserved (GB)", device),
            ("host, rank 0's process, peak (GB)", host),
        )
    ]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        return None
    figure = new_figure(WIDTH, (0.75 + 0.42 * len(rows)) * len(panels))
    for position, (label, found) in enumerate(panels, start=1):
        axes = figure.add_subplot(len(panels), 1, position)
        bars(axes, [row.run.recipe for row in rows], found, "{:.2f}")
        axes.set_xlabel(label)
    return figure


def mfu(rows: Sequence[Row]) -> Figure | None:
    """MFU, HFU where it differs, and the peak they are measured against."""
    return _line_panels(rows, mfu_panels(rows), columns=3)


def mfu_panels(rows: Sequence[Row]) -> list[tuple[str, str, float]]:
    """Key, label and factor of what says something: HFU does where a run recomputes, a constant peak is in a run's facts."""
    panels = [
        ("mfu/mfu", "MFU (%)", 100.0),
        ("mfu/hfu", "HFU: with recompute (%)", 100.0),
        ("mfu/tflops_per_device", "TFLOP/s of a device", 1.0),
        ("mfu/effective_peak", "effective peak (TFLOP/s)", 1.0),
    ]
    return [panel for panel in panels if panel[0] != "mfu/hfu" or any(_recomputes(row) for row in rows)]


def _recomputes(row: Row) -> bool:
    mfu, hfu = (row.run.metrics.get(key) for key in ("mfu/mfu", "mfu/hfu"))
    if mfu is None or hfu is None:
        return hfu is not None
    return len(mfu.values) != len(hfu.values) or not np.allclose(mfu.values, hfu.values, equal_nan=True)


def fp8_health(rows: Sequence[Row]) -> Figure | None:
    """The worst linear's saturation, underflow and SQNR for each operand over the run."""
    return _line_panels(rows, LINE_PANELS["fp8-health"], columns=3)


def kurtosis(rows: Sequence[Row]) -> Figure | None:
    """Kurtosis by layer over time."""
    return draw(rows, KURTOSIS)


def gradient_error(rows: Sequence[Row]) -> Figure | None:
    """The error that FP8 makes in the gradients of each block over time, with what the guard did to the block's layers."""
    return draw(rows, GRADIENT_ERROR)


def guard(rows: Sequence[Row]) -> Figure | None:
    """What the divergence guard measures, its alarms, and how many layers it has demoted."""
    return _line_panels(rows, LINE_PANELS["guard"], columns=2)


def _peak(series: Series | None) -> float:
    return float(np.nanmax(series.values)) if series is not None and len(series.values) else float("nan")


def _line_panels(
    rows: Sequence[Row], panels: Sequence[tuple[str, str, float]], columns: int
) -> Figure | None:
    """Small panels, one a metric that any run has, one line a run; a legend once for all."""
    shown = [panel for panel in panels if any(panel[0] in row.run.metrics for row in rows)]
    if not shown:
        return None
    columns = min(columns, len(shown))
    lines = -(-len(shown) // columns)
    figure = new_figure(WIDTH, 0.6 + 2.0 * lines)
    handles = {}
    kinds = [row.run.recipe for row in rows]
    for position, (key, label, scale) in enumerate(shown, start=1):
        axes = figure.add_subplot(lines, columns, position)
        axes.set_title(label, fontsize=9.5, fontweight="normal")
        for index, row in enumerate(rows):
            series = row.run.metrics.get(key)
            if series is None:
                continue
            style = run_style(kinds, index, len(series.steps))
            drawn = "steps-post" if key in COUNTS else "default"
            (handles[row.run.name],) = axes.plot(
                series.steps, scale * series.values, drawstyle=drawn, **style
            )
            _mark_non_finite(axes, series.steps, series.values, style["color"])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        if position > len(shown) - columns:
            axes.set_xlabel("step")
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper left", ncols=4, frameon=False, handlelength=3.2
    )
    return figure


def _last_finite(steps: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    finite = np.flatnonzero(np.isfinite(values))
    return (float(steps[finite[-1]]), float(values[finite[-1]])) if len(finite) else (np.nan, np.nan)


def _mark_non_finite(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str) -> None:
    """A cross on the axis where a value is NaN or Inf: a gap in a line alone would be easy to miss."""
    bad = steps[~np.isfinite(values)]
    if len(bad):
        axes.plot(
            bad,
            np.zeros(len(bad)),
            "x",
            color=colour,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            markersize=6,
        )


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


def _draw_then_label(figure: Figure, axes: Axes, ends: list[tuple[str, float, float, str]]) -> None:
    figure.draw_without_rendering()  # the layout must be known before labels can be kept apart
    label_ends(axes, ends)


FIGURES: tuple[FigureSpec, ...] = (
    FigureSpec(
        name="loss",
        title="Loss",
        caption="Mean over the last 2 % of the steps (each step: thin, in loss.png). Below: how much higher the smoothed loss is "
        "than that of the high-precision run with as many devices, at the same step. A cross on the axis is a value "
        "that is not finite.",
        draw=loss,
        without="No step of any run was logged.",
    ),
    FigureSpec(
        name="speed",
        title="Speed",
        caption="After the first 10 % of the steps, evaluation excluded.",
        draw=speed,
        without="Needs at least three steps of a run.",
    ),
    FigureSpec(
        name="sizes",
        title="FLOP/s and MFU by model size",
        caption="Means after the first 10 % of the steps, of each model's run on the most devices. MFU counts each GEMM against the "
        "peak of its own precision.",
        draw=sizes,
        without="Needs mfu_monitor in runs of several models.",
    ),
    FigureSpec(
        name="tasks",
        title="Downstream tasks",
        caption="LLM Foundry's in-context learning evaluation, the last of each run. A hundred questions leave a standard error of up to "
        "5 points.",
        draw=tasks,
        without="Not evaluated. Give icl_tasks in the YAML, as yamls/demo/downstream.yaml does.",
    ),
    FigureSpec(
        name="mfu",
        title="Model FLOPs utilisation",
        caption="Each GEMM counts against the peak of the precision that it ran in, so FP8 may be "
        "faster with a lower MFU: the effective peak rises with the share of FP8.",
        draw=mfu,
        without="Not logged. Add callbacks: {mfu_monitor: {}}; on a device that it does not know, give peak_flops.",
    ),
    FigureSpec(
        name="kurtosis",
        title="Kurtosis by layer",
        caption="Per token, mean over tokens. Layers upwards, steps to the right, one logarithmic colour scale. Outliers that grow show as a layer that "
        "turns lighter. Grey: not logged or not finite.",
        draw=kurtosis,
        without="Not logged. Add callbacks: {kurtosis_monitor: {}}.",
    ),
    FigureSpec(
        name="fp8-health",
        title="FP8 health",
        caption="The worst converted linear at each step, by operand: x input, w weight, dy gradient of the output.",
        draw=fp8_health,
        without="Not logged. Add callbacks: {fp8_monitor: {}}.",
    ),
    FigureSpec(
        name="guard",
        title="Divergence guard",
        caption="How far FP8 is from high precision on the same batch, the alarms so far, and the layers that run a finer recipe or high precision.",
        draw=guard,
        without="Not logged. Add callbacks: {divergence_guard: {}}.",
    ),
    FigureSpec(
        name="fp8-error",
        title="FP8's error by block",
        caption="Relative error of the gradients of each block in FP8, against high precision on the same batch. Blocks upwards, steps to the "
        "right, one logarithmic colour scale. A triangle that points down: a layer of the block was demoted; up: it returned to FP8.",
        draw=gradient_error,
        without="Not logged. Add callbacks: {divergence_guard: {}}.",
    ),
    FigureSpec(
        name="memory",
        title="Memory",
        caption="The largest figure of each run. Emulation keeps FP8 tensors but computes in higher precision, so a host's "
        "figure says little about a GPU.",
        draw=memory,
        without="Not logged.",
    ),
)
