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
GRID_STEPS = 150
"""Length of the runs over learning rates; longer ones are for FP8 against float32."""


def draw(result: dict[str, Any], image: Path) -> None:
    """Loss against learning rate by width, the optimum marked, over the seeds that ran at every rate; a table on the console."""
    by_seed: dict[tuple[str, str, int], dict[int, dict[float, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for run in (r for r in result["runs"] if r["steps"] == GRID_STEPS and not r.get("decay")):
        by_seed[run["kind"], run["precision"], run["width"]][run["seed"]][run["lr"]] = run["loss"]
    curves: dict[tuple[str, str, int], dict[float, list[float]]] = {}
    for key, seeds in by_seed.items():
        most = max(map(len, seeds.values()))
        whole = [losses for losses in seeds.values() if len(losses) == most]
        curves[key] = {lr: [losses[lr] for losses in whole] for lr in whole[0]}
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


def paired(result: dict[str, Any]) -> None:
    """FP8 against float32 at the same rate and seed, and what FP8 flushed of down_proj's input by activation, as Markdown tables."""
    keys = ("kind", "steps", "width", "lr", "seed", "decay", "optimizer")
    twins = {tuple(map(r.get, keys)): r["loss"] for r in result["runs"] if r["precision"] == "fp32"}
    pairs: dict[tuple[str, int, int, float], dict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    flushed: dict[str, list[list[float]]] = defaultdict(list)
    for run in (run for run in result["runs"] if run["precision"] == "fp8"):
        if (twin := twins.get(tuple(map(run.get, keys)))) is not None:
            kind = f"{run['kind']}, {run.get('optimizer', 'adamw')}"
            found = pairs[kind, run["steps"], run["width"], run.get("decay", 0.0)]
            found[run["lr"]].append(100 * (run["loss"] / twin - 1))
        if (run["steps"], run["width"], run["lr"]) == (GRID_STEPS, 64, 2.0**-3):
            layers = [100 * v for name, v in run["flushed"].items() if name.endswith("down_proj/x")]
            flushed[run["kind"]].append(layers)
    print("\n| run | steps | width | decay | rate | FP8 above float32, %, by seed | mean | standard error |")
    print("|---|---|---|---|---|---|---|---|")
    for (kind, steps, width, decay), by_rate in sorted(pairs.items()):
        chosen = {
            f"2^{math.log2(lr):.0f}": v
            for lr, v in sorted(by_rate.items())
            if len(v) > 1 or steps != GRID_STEPS
        }
        every = [x for found in chosen.values() for x in found]
        for name, found in {**chosen, "all": every}.items():
            each = ", ".join(f"{x:+.2f}" for x in found) if name != "all" else ""
            error = f"{statistics.stdev(found) / len(found) ** 0.5:.2f}" if len(found) > 1 else ""
            mean = f"{statistics.fmean(found):+.2f}" if found else ""
            print(f"| {kind} | {steps} | {width} | {decay:g} | {name} | {each} | {mean} | {error} |")
    print("\n| activation | seeds | % of down_proj's input flushed, layers 0 to 3 |\n|---|---|---|")
    for kind, by_seed in flushed.items():
        means = [statistics.fmean(layer) for layer in zip(*by_seed, strict=True)]
        print(
            f"| {kind.partition('-')[2] or 'gelu'} | {len(by_seed)} | {' '.join(f'{m:.2f}' for m in means)} |"
        )


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
