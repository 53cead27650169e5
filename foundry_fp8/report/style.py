"""How the figures are drawn: dark on white, legible in grey, runs distinguished by line and marker as well as by colour."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

__all__ = [
    "HEAT_MAP", "INK", "MISSING", "WIDTH", "add_legend", "as_svg", "group_style", "mark_non_finite", "new_figure",
    "run_style", "step_axis", "styled",
]  # fmt: skip

WIDTH = 5.6
"""Of a figure, in inches: its text can be read on a telephone, 360 px wide, and is as large as the page's on a screen."""
INK = "#1a1a1a"
MUTED = "#6b6b6b"
GRID = "#d9d9d9"
MISSING = "#b4b4b4"
"""Cells of a heat map that were not logged or are not finite."""
_ON_PAGE = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--rule)"}
"""What the page's style sheet says of light and dark."""
HEAT_MAP = "cividis"
"""Perceptually uniform, and the same to a reader with red-green deficiency; dark to light also in grey."""

# The colours of Okabe and Ito, distinguishable in every common form of colour blindness, one a precision; grey for the baseline,
# which can be seen on white and on black. https://jfly.uni-koeln.de/color/
COLOURS = {
    "high precision": "#808080",
    "delayed": "#0072B2",
    "current": "#D55E00",
    "block": "#009E73",
    "mxfp8": "#CC79A7",
    "unit": "#E69F00",
}
OTHER_COLOURS = ("#56B4E9", "#B8A200")
_DASHES: tuple[Any, ...] = ("-", "--", (0, (1, 1)), "-.", (0, (8, 2)), (0, (5, 1, 1, 1, 1, 1)))
"""What distinguishes runs of one precision."""
_MARKERS = "os^DvPX*"

_RC: Any = {
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "text.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "text.parse_math"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.8,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "axes.facecolor": "none",
    "figure.facecolor": "white",
    "path.simplify_threshold": 0.4,
    "svg.fonttype": "none",
    "svg.hashsalt": "foundry-fp8",
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Apply the style to what is drawn and saved inside; what diverged is drawn without a warning of NumPy's."""
    with matplotlib.rc_context(_RC), np.errstate(all="ignore"):
        yield


def new_figure(height: float) -> Figure:
    """A figure of :data:`WIDTH` and ``height`` inches, laid out so that labels do not collide; no pyplot, no global state."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def as_svg(figure: Figure, name: str) -> str:
    """The figure as an element of the page: text as text, ids that start with ``name``, ink and grid in the page's colours."""
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", facecolor="none", metadata=nothing)
    svg = re.sub(
        r'.*?<svg .*?(viewBox="[^"]*").*?</style>', r"<svg \1><defs>", out.getvalue(), count=1, flags=re.S
    )
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    for colour, variable in _ON_PAGE.items():
        svg = svg.replace(colour, variable)
    return svg


def _pen(precisions: Sequence[str], index: int) -> dict[str, Any]:
    """Of the run at ``index``: the colour is its precision's, line and marker distinguish it from others of that precision."""
    kinds = [precision.split(",")[0].split(" then ")[0] for precision in precisions]
    kind = kinds[index]
    others = [name for name in dict.fromkeys(kinds) if name not in COLOURS]
    before = kinds[:index].count(kind)
    return {
        "color": COLOURS[kind] if kind in COLOURS else OTHER_COLOURS[others.index(kind) % len(OTHER_COLOURS)],
        "linestyle": _DASHES[before % len(_DASHES)],
        "marker": _MARKERS[before % len(_MARKERS)],
    }


def group_style(groups: Sequence[tuple[str, str]], own: tuple[str, str]) -> dict[str, Any]:
    """The same for all runs of one model and precision, among such pairs: a colour a precision, a line and marker a model."""
    model, recipe = own
    number = [m for m, r in groups if r == recipe].index(model)
    return _pen([recipe] * (number + 1), number)


def run_style(precisions: Sequence[str], index: int, points: int) -> dict[str, Any]:
    """Line, colour and marker of the run at ``index``; about 8 markers over ``points`` points, apart from its neighbours'."""
    every = max(1, points // 8)
    first = (index * every) // max(1, len(precisions)) % every
    return {**_pen(precisions, index), "markevery": (first, every)}


def add_legend(figure: Figure) -> None:
    """Name the lines or bars of all axes once, above them; the figure grows by the lines that this takes."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        artists: list[Any] = [*axes.lines, *axes.containers]
        for artist in artists:
            name = str(artist.get_label())
            if not name.startswith(("_child", "_container")):  # matplotlib's own names
                found[name] = artist
    wide = 48 + 5.6 * max(map(len, found))  # points
    columns = min(len(found), max(1, int(72 * WIDTH / wide)))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(found) // columns))
    figure.legend(
        found.values(), found.keys(), loc="outside upper left", ncols=columns, frameon=False, handlelength=3.2
    )


def step_axis(axes: Axes) -> None:
    """As many whole steps as there is room for, thousands as k."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("step")


def mark_non_finite(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str) -> None:
    """A cross on the axis where a value is NaN or Inf: a gap in a line alone would be easy to miss."""
    bad = steps[~np.isfinite(values)]
    if len(bad):
        where = axes.get_xaxis_transform()
        axes.plot(bad, np.zeros(len(bad)), "x", color=colour, transform=where, clip_on=False, markersize=5)
