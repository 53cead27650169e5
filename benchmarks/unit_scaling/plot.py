"""The plot of variances at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


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
