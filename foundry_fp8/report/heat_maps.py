"""Heat maps of a report: layers upwards, steps to the right."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from foundry_fp8.report.comparison import Row
from foundry_fp8.report.run import Series
from foundry_fp8.report.style import HEAT_MAP, MISSING, WIDTH, new_figure

__all__ = ["gradient_error", "kurtosis"]

_LAYER = re.compile(r"(.+)/layer_(\d+)")
_BLOCK = re.compile(r"(?:^layer_|\.(?:layers|blocks|h)\.)(\d+)")

Maps = dict[tuple[str, int], dict[int, Series]]
"""By tensor and number of the run: a series by layer."""
MOST_COLUMNS = 3
"""Of maps beside each other."""
MOST_CELLS = 400
"""Of a map, from left to right."""
MARKS = {"demote": "v", "return": "^"}
"""How what the guard did is drawn on a heat map."""


def kurtosis(rows: Sequence[Row]) -> Figure | None:
    """Kurtosis by layer over time; per token where a run has that, since per sample looks alike."""
    maps = _maps(rows, "kurtosis")
    by_token = {where: layers for where, layers in maps.items() if where[0].startswith("kurtosis_token/")}
    return _draw(rows, by_token or maps, "kurtosis (Gaussian: 3)", 1.0, 10.0)


def gradient_error(rows: Sequence[Row]) -> Figure | None:
    """The error that FP8 makes in the gradients of each block over time, with what the guard did to the block's layers."""
    maps = _maps(rows, "fp8_error/gradient")
    return _draw(rows, maps, "relative error", 0.05, 1.0, axis="block", marks=_guard_marks)


def _draw(
    rows: Sequence[Row],
    maps: Maps,
    label: str,
    low: float,
    high: float,
    axis: str = "",
    marks: Callable[[Row], list[tuple[int, int, str]]] = lambda row: [],
) -> Figure | None:
    """One line of heat maps a tensor, one column a run, more runs below; for all one logarithmic colour scale from ``low`` to ``high`` or
    the largest value. ``axis`` is written beside the maps, by default the tensor; ``marks`` are step, block and action.
    """
    most = max((_largest(layers) for layers in maps.values()), default=0.0)
    if not most:
        return None
    tensors = list(dict.fromkeys(tensor for tensor, _ in maps))
    runs = sorted({index for _, index in maps})
    longest = max(len(rows[index].run.name) for index in runs)
    columns = max(1, min(MOST_COLUMNS, len(runs), int(72 * WIDTH / (25 + 5.2 * longest))))
    lines = [(start, tensor) for start in range(0, len(runs), columns) for tensor in tensors]
    high = max(high, most)
    norm = LogNorm(low, high)
    figure = new_figure(0.6 + 1.0 * len(lines) + 0.4 * len(lines) / len(tensors))
    grid = figure.subplots(len(lines), columns, squeeze=False)
    for (start, tensor), across in zip(lines, grid, strict=True):
        for x, axes in enumerate(across):
            if start + x >= len(runs):
                axes.set_axis_off()
                continue
            index = runs[start + x]
            axes.grid(False)
            name = f"{rows[index].run.name}\n" if tensor == tensors[0] else ""
            if x == 0:
                axes.set_ylabel(axis or tensor.rpartition("/")[2].replace("_", "\n"), fontsize=8.5)
            layers = maps.get((tensor, index))
            if layers is None:
                axes.set_title(f"{name}not logged")
                axes.set(xticks=[], yticks=[])
                continue
            axes.set_title(f"{name}at most {_text(_largest(layers))}")
            _heat_map(axes, layers, norm, marks(rows[index]))
            if tensor == tensors[-1]:
                axes.set_xlabel("step")
            else:
                axes.tick_params(labelbottom=False)
    bar = figure.colorbar(
        ScalarMappable(norm, HEAT_MAP), ax=grid, label=label, location="bottom", shrink=0.6, aspect=40,
        pad=0.02, ticks=LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)), format=FuncFormatter(lambda value, _: _text(value)),
    )  # fmt: skip
    assert bar.solids is not None
    bar.solids.set_rasterized(True)  # one image, not 256 rectangles
    return figure


def _largest(layers: dict[int, Series]) -> float:
    """The largest value that is finite; 0 if there is none above."""
    values = np.concatenate([series.values for series in layers.values()])
    return float(values[np.isfinite(values)].max(initial=0.0))


def _text(value: float) -> str:
    return format(value, ".3g" if value < 1000 else ",.0f")


def _grid(layers: dict[int, Series]) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Steps, numbers of the layers, and values ``[layers, steps]``; NaN where nothing was logged.

    Of a long run, a column has the largest of several measurements.
    """
    steps = np.unique(np.concatenate([series.steps for series in layers.values()]))
    numbers = sorted(layers)
    values = np.full((len(numbers), len(steps)), np.nan)
    for line, number in enumerate(numbers):
        values[line, np.searchsorted(steps, layers[number].steps)] = layers[number].values
    starts = np.arange(0, len(steps), -(-len(steps) // MOST_CELLS))
    return steps[starts], numbers, np.fmax.reduceat(values, starts, axis=1)


def _heat_map(
    axes: Axes, layers: dict[int, Series], norm: LogNorm, marks: Sequence[tuple[int, int, str]]
) -> None:
    """A column a measurement, however far apart they are: the guard measures again right after it demotes."""
    steps, numbers, values = _grid(layers)
    axes.imshow(values, aspect="auto", origin="lower", interpolation="none", cmap=HEAT_MAP, norm=norm)
    every = -(-len(numbers) // 3)
    axes.set_yticks(range(0, len(numbers), every), [str(number) for number in numbers[::every]])
    columns = np.unique(np.linspace(0, len(steps) - 1, 3).round().astype(int))
    axes.set_xticks(columns, [str(step) for step in steps[columns]])
    axes.set_facecolor(MISSING)
    for step, layer, action in marks:
        if layer in layers:
            at = min(int(np.searchsorted(steps, step)), len(steps) - 1), numbers.index(layer)
            axes.plot(*at, MARKS[action], color="white", mec="black", ms=5, mew=0.7)


def _maps(rows: Sequence[Row], prefix: str) -> Maps:
    maps: Maps = {}
    for index, row in enumerate(rows):
        for key, series in row.run.matching(prefix).items():
            found = _LAYER.fullmatch(key)
            if found:
                maps.setdefault((found[1], index), {})[int(found[2])] = series
    return maps


def _guard_marks(row: Row) -> list[tuple[int, int, str]]:
    """What the guard did to a layer that is named by its block's number."""
    return [
        (step, int(number[1]), action)
        for step, unit, action, *_ in row.run.guard_events
        if action in MARKS and (number := _BLOCK.search(unit))
    ]
