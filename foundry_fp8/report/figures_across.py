"""Figures that stand across runs: speed, over devices where runs differ in them; FLOP/s and MFU by model size; tasks; memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foundry_fp8.report.comparison import Row
from foundry_fp8.report.run import HIGH_PRECISION
from foundry_fp8.report.style import add_legend, group_style, new_figure, run_style

__all__ = ["memory", "scored", "sizes", "speed", "tasks"]

BY_SIZE = (("tflops_per_device", "TFLOP/s of a device", 1.0), ("mfu", "MFU (%)", 100.0))
"""Of figure by size: field of a row, label, factor."""


def speed(rows: Sequence[Row]) -> Figure | None:
    """Tokens a second and device: one bar a run, or lines over devices where runs differ in them."""
    shown = _speeds(rows)
    if not shown:
        return None
    if len({row.run.devices for _, row in shown}) == 1:
        figure = new_figure(0.55 + 0.32 * len(shown))
        axes = figure.add_subplot()
        bars = [(i, row.run.name, row.tokens_per_second_per_device) for i, row in shown]
        _bars(axes, [row.run.recipe for row in rows], bars, "{:,.0f}")
        axes.set_xlabel("tokens / second / device")
        return figure
    figure = new_figure(3.2)
    axes = figure.add_subplot()
    groups = _grouped([row for _, row in shown])
    for group, members in groups.items():
        devices = [row.run.devices for row in members]
        values = [row.tokens_per_second_per_device for row in members]
        axes.plot(devices, values, label=", ".join(group), **group_style(list(groups), group))
    axes.set_xscale("log")
    ticks = sorted({row.run.devices for _, row in shown})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("devices")
    axes.set_ylabel("tokens / second / device")
    add_legend(figure)
    return figure


def _speeds(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """The rows whose speed says something: not emulation's, nor that of its baselines where nothing else has one."""
    shown = [
        (i, row)
        for i, row in enumerate(rows)
        if np.isfinite(row.tokens_per_second_per_device) and row.run.backend != "emulated"
    ]
    alone = all(row.run.recipe == HIGH_PRECISION for _, row in shown)
    return [] if alone and any(row.run.backend for row in rows) else shown


def _grouped(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """By model and precision, each by devices."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.run.model, row.run.recipe), []).append(row)
    return {group: sorted(found, key=lambda row: row.run.devices) for group, found in groups.items()}


def sizes(rows: Sequence[Row]) -> Figure | None:
    """FLOP/s and MFU by model size, one bar a precision: each model's run on the most devices.

    Source: https://www.databricks.com/blog/turbocharged-training-optimizing-databricks-mosaic-ai-stack-fp8, figures 1 and 2.
    """
    measured = [
        row
        for row in rows
        if row.run.backend != "emulated" and any(np.isfinite(getattr(row, field)) for field, _, _ in BY_SIZE)
    ]
    # Models from small to large, baselines first.
    measured.sort(key=lambda row: (row.run.header.get("parameters") or 0, row.run.recipe != HIGH_PRECISION))
    groups = {group: members[-1] for group, members in _grouped(measured).items()}
    models = list(dict.fromkeys(model for model, _ in groups))
    recipes = list(dict.fromkeys(recipe for _, recipe in groups))
    if len(models) < 2:
        return None
    shown = [p for p in BY_SIZE if any(np.isfinite(getattr(row, p[0])) for row in groups.values())]
    figure = new_figure(1.9 * len(shown))
    width = 0.8 / len(recipes)
    for place, (field, label, factor) in enumerate(shown, start=1):
        axes = figure.add_subplot(len(shown), 1, place)
        for number, recipe in enumerate(recipes):
            found = {m: factor * getattr(row, field) for (m, r), row in groups.items() if r == recipe}
            found = {model: value for model, value in found.items() if np.isfinite(value)}
            offset = (number - (len(recipes) - 1) / 2) * width
            at = np.array([models.index(model) for model in found]) + offset
            colour = group_style([("", name) for name in recipes], ("", recipe))["color"]
            drawn = axes.bar(at, list(found.values()), width * 0.92, color=colour, label=recipe)
            axes.bar_label(drawn, fmt="%.0f", fontsize=8, padding=1)
        axes.set_xticks(range(len(models)), models)
        axes.set_title(label)
        axes.margins(y=0.15)  # for the values on the bars
        axes.grid(axis="x", visible=False)
    add_legend(figure)
    return figure


def scored(rows: Sequence[Row]) -> tuple[list[str], list[tuple[int, Row]]]:
    """The downstream tasks that any run was evaluated on, and the runs that were."""
    shown = [(i, row) for i, row in enumerate(rows) if row.scores]
    return list(dict.fromkeys(task for _, row in shown for task in row.scores)), shown


def tasks(rows: Sequence[Row]) -> Figure | None:
    """The last score of each downstream task, one mark a run."""
    names, shown = scored(rows)
    if not shown:
        return None
    kinds = [row.run.recipe for row in rows]
    figure = new_figure(0.5 + (0.16 + 0.09 * len(shown)) * len(names))
    axes = figure.add_subplot()
    for order, (index, row) in enumerate(shown):
        # Beside each other, so that equal scores do not hide one another.
        offset = 0.5 * (order / max(1, len(shown) - 1) - 0.5) if len(shown) > 1 else 0.0
        points = [
            (100 * row.scores[name], place + offset) for place, name in enumerate(names) if name in row.scores
        ]
        style = run_style(kinds, index, 1)
        axes.plot(*zip(*points, strict=True), linestyle="none", color=style["color"], marker=style["marker"], markersize=6,
                  label=row.run.name)  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("accuracy (%)")
    add_legend(figure)
    return figure


def memory(rows: Sequence[Row]) -> Figure | None:
    """Largest memory of each run: of the device where Composer's memory_monitor logged it, else of the process."""
    device = [
        (i, row.run.name, float(np.nanmax(series.values, initial=0.0)))
        for i, row in enumerate(rows)
        if (series := row.run.metrics.get("memory/peak_reserved_mem")) is not None
    ]
    # GB, as Composer's memory_monitor logs.
    host = [
        (i, row.run.name, float(np.nanmax(row.run.host_peak_bytes, initial=0.0)) / 1e9)
        for i, row in enumerate(rows)
    ]
    found = {"device, peak reserved (GB)": device, "host, rank 0's process, peak (GB)": host}
    known = {label: [b for b in bars if np.isfinite(b[2]) and b[2] > 0] for label, bars in found.items()}
    panels = {label: bars for label, bars in known.items() if bars}
    if not panels:
        return None
    figure = new_figure((0.55 + 0.32 * len(rows)) * len(panels))
    for position, (label, bars) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(len(panels), 1, position)
        _bars(axes, [row.run.recipe for row in rows], bars, "{:.2f}")
        axes.set_xlabel(label)
    return figure


def _bars(axes: Axes, kinds: Sequence[str], found: Sequence[tuple[int, str, float]], form: str) -> None:
    """Horizontal bars from ``(index of the run, name, value)``, the value written at the end of each."""
    largest = max(value for _, _, value in found)
    for position, (index, _, value) in enumerate(found):
        axes.barh(position, value, height=0.6, color=run_style(kinds, index, 1)["color"])
        axes.text(value + 0.01 * largest, position, form.format(value), va="center", fontsize=9)
    axes.set_yticks(range(len(found)), [name for _, name, _ in found])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(found) - 0.45, -0.55)
    axes.set_xlim(0, 1.12 * largest)
    axes.grid(axis="y", visible=False)
