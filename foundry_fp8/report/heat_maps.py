"""Heat maps of a report: layers upwards, steps to the right."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from foundry_fp8.report.comparison import Row, guard_events
from foundry_fp8.report.run import Series
from foundry_fp8.report.style import HEAT_MAP, MUTED, WIDTH, new_figure

__all__ = [
    "GRADIENT_ERROR",
    "KURTOSIS",
    "HeatMap",
    "draw",
    "grid_of",
    "largest",
]

_LAYER = re.compile(r"(.+)/layer_(\d+)")
_BLOCK = re.compile(r"(?:^layer_|\.(?:layers|blocks|h)\.)(\d+)")

Maps = dict[tuple[str, int], dict[int, Series]]
"""By tensor and number of the run: a series by layer."""
MARKS = {"demote": "v", "promote": "^"}
"""How what the guard did is drawn on a heat map."""


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """What a heat map shows: its metrics, its logarithmic colour scale (from ``low`` to ``high`` or the largest value), its marks."""

    maps: Callable[[Sequence[Row]], Maps]
    label: str
    low: float
    high: float
    axis: Callable[[str], str] = lambda tensor: tensor.rpartition("/")[2].replace("_", "\n")
    """What is written beside the map of a tensor."""
    marks: Callable[[Row], list[tuple[int, int, str]]] = lambda row: []
    """Step, block and action of what is marked on the map of a run."""


def largest(maps: Maps) -> float | None:
    """The largest value above zero that is finite."""
    values = [series.values for layers in maps.values() for series in layers.values()]
    finite = np.concatenate([v[np.isfinite(v) & (v > 0)] for v in values]) if values else np.array([])
    return float(finite.max()) if len(finite) else None


def grid_of(layers: dict[int, Series]) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Steps, numbers of the layers, and values ``[layers, steps]``; NaN where nothing was logged."""
    steps = np.unique(np.concatenate([series.steps for series in layers.values()]))
    numbers = sorted(layers)
    values = np.full((len(numbers), len(steps)), np.nan)
    for line, number in enumerate(numbers):
        values[line, np.searchsorted(steps, layers[number].steps)] = layers[number].values
    return steps, numbers, values


def draw(rows: Sequence[Row], shown: HeatMap) -> Figure | None:
    """One row of heat maps a tensor, one column a run, one logarithmic colour scale for all."""
    maps = shown.maps(rows)
    most = largest(maps)
    if most is None:
        return None
    tensors = list(dict.fromkeys(tensor for tensor, _ in maps))
    columns = sorted({index for _, index in maps})
    norm = LogNorm(vmin=shown.low, vmax=max(shown.high, most))
    figure = new_figure(max(WIDTH, 2.6 * len(columns)), 0.9 + 1.25 * len(tensors))
    grid = figure.subplots(len(tensors), len(columns), squeeze=False, sharex="col")
    image: Any = None
    for y, tensor in enumerate(tensors):
        for x, index in enumerate(columns):
            axes = grid[y][x]
            axes.grid(False)
            if y == 0:
                axes.set_title(rows[index].run.name)
            if x == 0:
                axes.set_ylabel(shown.axis(tensor), fontsize=9)
            layers = maps.get((tensor, index))
            if layers is None:
                axes.text(
                    0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color=MUTED
                )
                axes.set_yticks([])
                continue
            image = _heat_map(axes, layers, norm)
            for step, layer, action in shown.marks(rows[index]):
                if layer in layers:
                    at = sorted(layers).index(layer)
                    axes.plot(step, at, MARKS[action], color="white", mec="black", ms=6, mew=0.7)
            if y == len(tensors) - 1:
                axes.set_xlabel("step")
    figure.colorbar(image, ax=grid, label=shown.label, shrink=0.8, pad=0.01)
    return figure


def _heat_map(axes: Axes, layers: dict[int, Series], norm: LogNorm) -> Any:
    steps, numbers, values = grid_of(layers)
    image = axes.imshow(
        values,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap=HEAT_MAP,
        norm=norm,
        extent=(_edge(steps, 0), _edge(steps, -1), -0.5, len(numbers) - 0.5),
    )
    every = max(1, len(numbers) // 4)
    axes.set_yticks(range(0, len(numbers), every), [str(number) for number in numbers[::every]])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.set_facecolor("#e8e8e8")  # missing and non-finite cells
    return image


def _edge(steps: np.ndarray, end: int) -> float:
    half = float(np.median(np.diff(steps))) / 2 if len(steps) > 1 else 0.5
    return float(steps[end]) + (half if end else -half)


def _maps(rows: Sequence[Row], prefix: str) -> Maps:
    maps: Maps = {}
    for index, row in enumerate(rows):
        for key, series in row.run.matching(prefix).items():
            found = _LAYER.fullmatch(key)
            if found:
                maps.setdefault((found[1], index), {})[int(found[2])] = series
    return maps


def _gradient_error_maps(rows: Sequence[Row]) -> Maps:
    """By run, the relative error of each block's gradient."""
    return _maps(rows, "fp8_error/gradient")


def _guard_marks(row: Row) -> list[tuple[int, int, str]]:
    """What the guard did to a layer that is named by its block's number."""
    found = []
    for step, unit, action, *_ in guard_events(row.run):
        number = _BLOCK.search(unit)
        if number and action in MARKS:
            found.append((step, int(number[1]), action))
    return found


def _kurtosis_maps(rows: Sequence[Row]) -> Maps:
    """By tensor and run, kurtosis by layer; per token where a run has that, since per sample looks alike."""
    maps = _maps(rows, "kurtosis")
    by_token = {where: layers for where, layers in maps.items() if where[0].startswith("kurtosis_token/")}
    return by_token or maps


KURTOSIS = HeatMap(_kurtosis_maps, "kurtosis (Gaussian: 3)", 1.0, 10.0)
GRADIENT_ERROR = HeatMap(
    _gradient_error_maps, "relative error", 0.05, 1.0, axis=lambda tensor: "block", marks=_guard_marks
)
