"""The page's charts: hover, zoom, one legend for all; the same data and choices as the figures beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from foundry_fp8.report.across import BY_SIZE, by_size, over_devices, scored, speeds
from foundry_fp8.report.comparison import Row
from foundry_fp8.report.figures import COUNTS, LINE_PANELS, mfu_panels, smooth
from foundry_fp8.report.heat_maps import GRADIENT_ERROR, KURTOSIS, HeatMap, grid_of, largest
from foundry_fp8.report.style import group_line_style, line_style

__all__ = ["CHARTS", "as_html", "script"]

MOST_POINTS = 1500
"""Of a line; longer runs are thinned for the page, not for the figures."""
MOST_COLUMNS = 3
"""Of heat maps beside each other."""
MARKERS = ("circle", "square", "diamond", "cross", "triangle-up", "star")
"""Of runs of one precision."""
_SCALE = [[0.0, "#00224e"], [0.5, "#7d7c78"], [1.0, "#fee838"]]  # cividis


def script() -> str:
    """The library, for the one file."""
    return str(get_plotlyjs())


def as_html(figure: go.Figure, name: str) -> str:
    """A ``div`` and its data; :func:`script` draws it."""
    data = json.dumps(json.loads(figure.to_json(validate=False)), allow_nan=False).replace("</", "<\\/")
    return (
        f'<div class="chart" id="chart-{name}" style="height: {int(figure.layout.height)}px"></div>'
        f'<script type="application/json" class="chart-data" data-for="chart-{name}">{data}</script>'
    )


def loss(rows: Sequence[Row]) -> go.Figure | None:
    """Loss curves on top of each other, and below them the difference from the baseline."""
    shown = [(i, row) for i, row in enumerate(rows) if len(row.run.step)]
    if not shown:
        return None
    paired = [(i, row) for i, row in shown if row.baseline is not None and len(row.baseline.step)]
    figure = make_subplots(rows=2 if paired else 1, cols=1, shared_xaxes=True, vertical_spacing=0.06,
                           row_heights=[0.68, 0.32] if paired else None)  # fmt: skip
    for index, row in shown:
        _line(figure, rows, index, row.run.step, smooth(row.run.loss), legend=True, form=":.4f")
    for index, row in paired:
        assert row.baseline is not None
        steps, here, there = np.intersect1d(row.run.step, row.baseline.step, return_indices=True)
        if len(steps):
            percent = 100 * (smooth(row.run.loss[here]) / smooth(row.baseline.loss[there]) - 1)
            _line(figure, rows, index, steps, percent, place=2, form=":+.2f", unit=" %")
    figure.update_yaxes(title_text="training loss", row=1, col=1)
    if paired:
        figure.update_yaxes(title_text="% loss higher", zeroline=True, row=2, col=1)
    figure.update_xaxes(title_text="step", row=2 if paired else 1, col=1)
    return _laid_out(figure, 560 if paired else 400)


def speed(rows: Sequence[Row]) -> go.Figure | None:
    """Tokens a second and device: over devices where runs differ in them, else one bar a run."""
    groups = over_devices(rows)
    figure = go.Figure()
    if not groups:
        shown = speeds(rows)
        for index, row in shown:
            figure.add_bar(y=[row.run.name], x=[row.tokens_per_second_per_device], orientation="h", name=row.run.name,
                           marker_color=_look(rows, index)[0], hovertemplate="%{x:,.0f}<extra>%{y}</extra>")  # fmt: skip
        figure.update_layout(
            showlegend=False, xaxis_title="tokens / second / device", yaxis_autorange="reversed"
        )
        return _laid_out(figure, 110 + 32 * len(shown)) if shown else None
    for group in groups:
        colour, dash, _ = group_line_style([(g.model, g.recipe) for g in groups], (group.model, group.recipe))
        figure.add_scatter(
            x=[row.run.devices for _, row in group.rows], y=[row.tokens_per_second_per_device for _, row in group.rows],
            name=f"{group.model}, {group.recipe}", mode="lines+markers", line={"color": colour, "dash": dash},
            hovertemplate="%{x} devices: %{y:,.0f}<extra>%{fullData.name}</extra>",
        )  # fmt: skip
    ticks = sorted({row.run.devices for group in groups for _, row in group.rows})
    figure.update_xaxes(type="log", title_text="devices", tickvals=ticks)
    figure.update_yaxes(title_text="tokens / second / device", rangemode="tozero")
    return _laid_out(figure, 400)


def sizes(rows: Sequence[Row]) -> go.Figure | None:
    """FLOP/s and MFU by model size, one bar a precision."""
    groups = by_size(rows)
    if not groups:
        return None
    models = list(dict.fromkeys(group.model for group in groups))
    shown = [p for p in BY_SIZE if any(np.isfinite(getattr(group.rows[0][1], p[0])) for group in groups)]
    figure = make_subplots(rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=0.16,
                           subplot_titles=[label for _, label, _ in shown])  # fmt: skip
    for recipe in dict.fromkeys(group.recipe for group in groups):
        found = {group.model: group.rows[0][1] for group in groups if group.recipe == recipe}
        for place, (field, _, factor) in enumerate(shown, start=1):
            values = np.array([factor * getattr(found[m], field) if m in found else np.nan for m in models])
            figure.add_bar(
                x=models, y=_listed(values), name=recipe, legendgroup=recipe, showlegend=place == 1, texttemplate="%{y:.0f}",
                marker_color=line_style([recipe], 0)[0], hovertemplate="%{x}: %{y:.1f}<extra>%{fullData.name}</extra>", row=place, col=1,
            )  # fmt: skip
    figure.update_layout(barmode="group")
    return _laid_out(figure, 110 + 190 * len(shown))


def tasks(rows: Sequence[Row]) -> go.Figure | None:
    """The last score of each downstream task, one mark a run."""
    names, shown = scored(rows)
    if not shown:
        return None
    figure = go.Figure()
    for index, row in shown:
        colour, _, number = _look(rows, index)
        known = [name for name in names if name in row.scores]
        figure.add_scatter(
            x=[100 * row.scores[name] for name in known], y=known, name=row.run.name, mode="markers",
            marker={"color": colour, "size": 10, "symbol": MARKERS[number % len(MARKERS)]},
            hovertemplate="%{y}: %{x:.1f} %<extra>%{fullData.name}</extra>",
        )  # fmt: skip
    figure.update_layout(xaxis_title="accuracy (%)", scattermode="group")
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1])
    return _laid_out(figure, 120 + 34 * len(names) + 8 * len(shown) * len(names))


def kurtosis(rows: Sequence[Row]) -> go.Figure | None:
    """Kurtosis by layer over time."""
    return _heat_maps(rows, KURTOSIS)


def gradient_error(rows: Sequence[Row]) -> go.Figure | None:
    """The error that FP8 makes in the gradients of each block over time."""
    return _heat_maps(rows, GRADIENT_ERROR)


def _heat_maps(rows: Sequence[Row], shown: HeatMap) -> go.Figure | None:
    """A heat map a tensor and run, one colour scale for all."""
    found = shown.maps(rows)
    most = largest(found)
    if most is None:
        return None
    tensors = list(dict.fromkeys(tensor for tensor, _ in found))
    maps = {
        where: found[where] for where in sorted(found, key=lambda where: (tensors.index(where[0]), where[1]))
    }
    columns = min(MOST_COLUMNS, len({index for _, index in maps}))
    figure = make_subplots(
        rows=-(-len(maps) // columns), cols=columns, shared_yaxes=True,
        horizontal_spacing=0.03, vertical_spacing=0.5 / max(2, -(-len(maps) // columns)),
        subplot_titles=[f"{rows[index].run.name}: {tensor.rpartition('/')[2]}" for tensor, index in maps],
    )  # fmt: skip
    for place, ((_, index), layers) in enumerate(maps.items()):
        steps, numbers, grid = grid_of(layers)
        thin = slice(None, None, max(1, len(steps) // 400))
        with np.errstate(invalid="ignore", divide="ignore"):
            logarithm = np.log10(np.where(np.isfinite(grid) & (grid > 0), grid, np.nan))[:, thin]
        figure.add_heatmap(
            x=steps[thin].tolist(), y=numbers, z=_listed(logarithm), customdata=_listed(grid[:, thin]), coloraxis="coloraxis",
            hovertemplate="step %{x}, layer %{y}: %{customdata:.3g}<extra></extra>",
            row=place // columns + 1, col=place % columns + 1,
        )  # fmt: skip
        marks = shown.marks(rows[index])
        if marks:
            x, y, actions = zip(*marks, strict=True)
            figure.add_scatter(
                x=x, y=y, text=actions, mode="markers", showlegend=False, hovertemplate="step %{x}, layer %{y}: %{text}<extra></extra>",
                marker={"color": "white", "line": {"color": "black", "width": 1}, "size": 9,
                        "symbol": [f"triangle-{'down' if action == 'demote' else 'up'}" for action in actions]},
                row=place // columns + 1, col=place % columns + 1,
            )  # fmt: skip
    lowest = float(np.log10(shown.low))
    ticks = list(range(int(np.ceil(lowest)), int(np.ceil(np.log10(max(shown.high, most)))) + 1))
    figure.update_layout(coloraxis={
        "colorscale": _SCALE, "cmin": lowest, "cmax": ticks[-1],
        "colorbar": {"title": shown.label.split(" (")[0], "tickvals": ticks, "ticktext": [f"{10.0**tick:,g}" for tick in ticks], "thickness": 12},
    })  # fmt: skip
    figure.update_annotations(font_size=10)
    return _laid_out(figure, 120 + 120 * -(-len(maps) // columns))


def memory(rows: Sequence[Row]) -> go.Figure | None:
    """Largest memory of each run, of the device where it was logged, else of rank 0's process."""
    figure = go.Figure()
    device = [row.run.metrics.get("memory/peak_reserved_mem") for row in rows]
    on_device = any(series is not None for series in device)
    for index, (row, series) in enumerate(zip(rows, device, strict=True)):
        host = row.run.host_peak_bytes
        found = series.values if series is not None else host / 1e9 if not on_device else np.array([])
        peak = float(np.nanmax(found)) if np.isfinite(found).any() else 0.0
        if peak > 0:
            figure.add_bar(y=[row.run.name], x=[peak], orientation="h", marker_color=_look(rows, index)[0],
                           hovertemplate="%{x:.2f} GB<extra>%{y}</extra>")  # fmt: skip
    if not figure.data:
        return None
    what = "device, peak reserved (GB)" if on_device else "host, rank 0's process, peak (GB)"
    figure.update_layout(showlegend=False, xaxis_title=what, yaxis_autorange="reversed")
    return _laid_out(figure, 110 + 32 * len(figure.data))


def panels(
    which: Callable[[Sequence[Row]], Sequence[tuple[str, str, float]]],
) -> Callable[[Sequence[Row]], go.Figure | None]:
    """A chart of small panels, one a metric that any run has, one line a run."""

    def draw(rows: Sequence[Row]) -> go.Figure | None:
        shown = [panel for panel in which(rows) if any(panel[0] in row.run.metrics for row in rows)]
        if not shown:
            return None
        figure = make_subplots(rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=0.35 / max(4, 2 * len(shown)),
                               subplot_titles=[label for _, label, _ in shown])  # fmt: skip
        seen: set[int] = set()
        for place, (key, _, scale) in enumerate(shown, start=1):
            for index, row in enumerate(rows):
                series = row.run.metrics.get(key)
                if series is not None:
                    _line(
                        figure,
                        rows,
                        index,
                        series.steps,
                        scale * series.values,
                        place=place,
                        legend=index not in seen,
                        shape="hv" if key in COUNTS else "linear",
                    )
                    seen.add(index)
        figure.update_xaxes(title_text="step", row=len(shown), col=1)
        return _laid_out(figure, 110 + 150 * len(shown))

    return draw


def _look(rows: Sequence[Row], index: int) -> tuple[str, str, int]:
    return line_style([row.run.recipe for row in rows], index)


def _line(
    figure: go.Figure, rows: Sequence[Row], index: int, x: np.ndarray, y: np.ndarray, *, place: int = 1,
    legend: bool = False, form: str = ":.4g", unit: str = "", shape: str = "linear",
) -> None:  # fmt: skip
    colour, dash, _ = _look(rows, index)
    name = rows[index].run.name
    every = max(1, -(-len(x) // MOST_POINTS))
    keep = np.unique(np.r_[0 : len(x) : every, max(0, len(x) - 1) : len(x)]).astype(
        int
    )  # the last one always
    figure.add_scatter(
        x=x[keep].tolist(), y=_listed(y[keep]), name=name, legendgroup=name, showlegend=legend,
        mode="lines" if len(keep) > 1 else "markers", line={"color": colour, "dash": dash, "width": 1.8, "shape": shape},
        hovertemplate=f"step %{{x}}: %{{y{form}}}{unit}<extra>{name}</extra>", row=place, col=1,
    )  # fmt: skip
    bad = x[~np.isfinite(y)]
    if len(bad):  # a gap alone would be easy to miss
        low = np.nanmin(y[np.isfinite(y)]) if np.isfinite(y).any() else 0.0
        figure.add_scatter(
            x=bad.tolist(), y=[float(low)] * len(bad), mode="markers", legendgroup=name, showlegend=False,
            marker={"symbol": "x", "color": colour, "size": 8}, hovertemplate=f"step %{{x}}: not finite<extra>{name}</extra>",
            row=place, col=1,
        )  # fmt: skip


def _listed(values: np.ndarray) -> list[Any]:
    """With ``None`` for what is not finite: JSON has no other word."""
    plain = values.astype(object)
    plain[~np.isfinite(values)] = None
    return list(plain.tolist())


def _laid_out(figure: go.Figure, height: int) -> go.Figure:
    """Without colours of its own but the lines': the page's style sheet gives text and grid those of light or dark."""
    figure.update_layout(
        height=height, margin={"l": 8, "r": 8, "t": 28, "b": 8}, template="none",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"size": 12}, hovermode="closest",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1 + 28 / height, "x": 0},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#888888", "activecolor": "#888888"},
    )  # fmt: skip
    figure.update_xaxes(automargin=True, gridcolor="#88888844", zeroline=False)
    figure.update_yaxes(automargin=True, gridcolor="#88888844", zeroline=False)
    return figure


CHARTS: dict[str, Callable[[Sequence[Row]], go.Figure | None]] = {
    "loss": loss,
    "speed": speed,
    "sizes": sizes,
    "tasks": tasks,
    "mfu": panels(mfu_panels),
    "kurtosis": kurtosis,
    "fp8-health": panels(lambda rows: LINE_PANELS["fp8-health"]),
    "guard": panels(lambda rows: LINE_PANELS["guard"]),
    "fp8-error": gradient_error,
    "memory": memory,
}
"""By the name of the figure that it stands for."""
