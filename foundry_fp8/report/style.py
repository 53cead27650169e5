"""How the figures are drawn: dark on white, legible in grey, runs distinguished by line and marker as well as by colour."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = [
    "HEAT_MAP",
    "INK",
    "MUTED",
    "WIDTH",
    "group_line_style",
    "group_style",
    "label_ends",
    "line_style",
    "new_figure",
    "run_style",
    "styled",
]

WIDTH = 9.0
"""Of a figure, in inches."""
INK = "#1a1a1a"
MUTED = "#6b6b6b"
GRID = "#d9d9d9"
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
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""What distinguishes runs of one precision; in the words of the page's charts."""
_LINES: dict[str, Any] = {
    "solid": "-", "dash": "--", "dot": (0, (1, 1)), "dashdot": "-.", "longdash": (0, (8, 2)),
    "longdashdot": (0, (5, 1, 1, 1, 1, 1)),
}  # fmt: skip
_MARKERS = "os^DvPX*"

_RC: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "foundry-fp8",
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Apply the style to what is drawn and saved inside."""
    with matplotlib.rc_context(_RC):
        yield


def new_figure(width: float, height: float) -> Figure:
    """A figure of ``width`` x ``height`` inches, laid out so that labels do not collide; no pyplot, no global state."""
    return Figure(figsize=(width, height), layout="constrained")


def line_style(precisions: Sequence[str], index: int) -> tuple[str, str, int]:
    """Colour, dash and number of the run at ``index``: the colour is its precision's, the rest distinguishes it from others of it."""
    own = precisions[index]
    kind = own.split(",")[0].split(" then ")[0]
    others = [
        name
        for name in dict.fromkeys(p.split(",")[0].split(" then ")[0] for p in precisions)
        if name not in COLOURS
    ]
    colour = COLOURS[kind] if kind in COLOURS else OTHER_COLOURS[others.index(kind) % len(OTHER_COLOURS)]
    before = sum(p.split(",")[0].split(" then ")[0] == kind for p in precisions[:index])
    return colour, DASHES[before % len(DASHES)], before


def group_line_style(groups: Sequence[tuple[str, str]], own: tuple[str, str]) -> tuple[str, str, int]:
    """The same for all runs of one model and precision, among such pairs: a colour a precision, a dash a model."""
    model, recipe = own
    number = [m for m, r in groups if r == recipe].index(model)
    return line_style([recipe] * (number + 1), number)


def group_style(groups: Sequence[tuple[str, str]], own: tuple[str, str]) -> dict[str, Any]:
    """:func:`group_line_style` in matplotlib's words."""
    colour, dash, number = group_line_style(groups, own)
    return {"color": colour, "linestyle": _LINES[dash], "marker": _MARKERS[number % len(_MARKERS)]}


def run_style(precisions: Sequence[str], index: int, points: int) -> dict[str, Any]:
    """Line, colour and marker of the run at ``index``; about 8 markers over ``points`` points, apart from its neighbours'."""
    colour, dash, number = line_style(precisions, index)
    every = max(1, points // 8)
    return {
        "color": colour,
        "linestyle": _LINES[dash],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markevery": ((index * every) // max(1, len(precisions)) % every, every),
    }


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Write each line's name beside its end, spread so that names do not overlap, with a thin leader to the line.

    Args:
        axes: Where the lines are; its limits must be final.
        ends: ``(name, x, y, colour)`` of each line's last finite point.
    """
    inside = [end for end in ends if np.isfinite(end[1]) and np.isfinite(end[2])]
    if not inside:
        return
    bottom, top = axes.get_ylim()

    def to_axes(y: float) -> float:
        return min(1.0, max(0.0, (y - bottom) / (top - bottom)))

    assert axes.figure is not None
    points = axes.get_window_extent().height / axes.figure.dpi * 72
    gap = 12.0 / max(points, 60.0)
    left, right = axes.get_xlim()
    placed: list[float] = []
    ordered = sorted(inside, key=lambda end: end[2])
    for _, _, y, _ in ordered:
        placed.append(max(to_axes(y), placed[-1] + gap) if placed else to_axes(y))
    # Pushed up in reading order, then moved back so that the group stays around its lines.
    shift = float(np.mean([spot - to_axes(end[2]) for spot, end in zip(placed, ordered, strict=True)]))
    for spot, (name, x, y, colour) in zip(placed, ordered, strict=True):
        at = ((x - left) / (right - left), to_axes(y))
        axes.annotate(
            name,
            xy=at,
            xytext=(1.025, spot - shift),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontsize=9.5,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 0},
            annotation_clip=False,
        )
