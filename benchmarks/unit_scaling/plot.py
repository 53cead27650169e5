"""Tables and plots of the evidence for µnit Scaling."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ARMS = (("mus", "fp32", "µS, float32"), ("mus", "fp8", "µS, FP8 (unit)"), ("sp", "fp32", "SP, float32"))


def draw(result: dict[str, Any], image: Path) -> None:
    """Loss against learning rate by width, the optimum marked; the same as a Markdown table on the console."""
    curves: dict[tuple[str, str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in result["runs"]:
        curves[run["kind"], run["precision"], run["width"]][run["lr"]].append(run["loss"])
    figure, axes = plt.subplots(1, len(ARMS), figsize=(12, 3.6), sharey=True)
    print("| run | width | seeds | best lr | held-out loss there | loss by lr, from the lowest |")
    print("|---|---|---|---|---|---|")
    for axis, (kind, precision, title) in zip(axes, ARMS, strict=True):
        widths = sorted(width for k, p, width in curves if (k, p) == (kind, precision))
        for shade, width in enumerate(widths):
            curve = curves[kind, precision, width]
            rates = sorted(curve)
            means = [statistics.fmean(curve[lr]) for lr in rates]
            best = min(range(len(rates)), key=lambda i, means=means: means[i])
            seeds = min(len(losses) for losses in curve.values())
            row = " ".join(f"{mean:.3f}" for mean in means)
            print(
                f"| {title} | {width} | {seeds} | 2^{math.log2(rates[best]):.0f} | {means[best]:.4f} | {row} |"
            )
            colour = plt.get_cmap("viridis")(shade / max(1, len(widths)))
            axis.plot(rates, means, marker="o", markersize=3, color=colour, label=f"width {width}")
            axis.plot(rates[best], means[best], marker="*", markersize=13, color=colour)
        axis.set(
            xscale="log",
            title=title,
            xlabel="learning rate (of width 32)" if kind == "mus" else "learning rate",
        )
        axis.set_xscale("log", base=2)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("held-out loss")
    axes[0].set_ylim(top=4.0)
    figure.tight_layout()
    image.parent.mkdir(exist_ok=True)
    figure.savefig(image, dpi=110)


def draw_initial(result: dict[str, Any], image: Path) -> None:
    """Standard deviations by layer, and of attention's output by position."""
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4))
    for kind, title, colour in (("mus", "µS", "tab:blue"), ("sp", "SP", "tab:orange")):
        found = dict(result["std"][kind])
        by_position, stream = found.pop("attention by position"), found.pop("stream")
        for axis, what in zip(axes, ("y", "w", "dy"), strict=False):
            axis.semilogy(
                [value[what] for value in found.values()], marker="o", markersize=3, color=colour, label=title
            )
            axis.set(
                title={"y": "outputs", "w": "weights", "dy": "gradients of outputs"}[what],
                xlabel="hidden linear",
            )
        axes[3].semilogy(range(0, 8 * len(by_position), 8), by_position, color=colour, label=title)
        print(title, "stream", [round(value, 3) for value in stream])
        print(title, "outputs", [round(value["y"], 3) for value in found.values()])
    axes[3].set(title="attention's output, last layer", xlabel="position")
    axes[0].set_ylabel("standard deviation")
    axes[0].legend()
    figure.tight_layout()
    image.parent.mkdir(exist_ok=True)
    figure.savefig(image, dpi=110)
    spread = [row["std x tokens x width"] for row in result["dy"]]
    print("dy std x tokens x width:", round(min(spread), 4), "to", round(max(spread), 4))
    print("largest |dy| x scale:", round(max(row["amax x scale"] for row in result["dy"]), 1), "of 57344")
    for what in ("flushed without scale", "flushed"):
        values = [row[what] for row in result["dy"]]
        print(what, f"{min(values):.2%} to {max(values):.2%}")
    print("x flushed, last layer:", result["activation"])
