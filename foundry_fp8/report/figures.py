"""The figures of a report: what each is called, what a reader must know about it, who draws it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from foundry_fp8.report.comparison import Row
from foundry_fp8.report.figures_across import memory, sizes, speed, tasks
from foundry_fp8.report.heat_maps import gradient_error, kurtosis
from foundry_fp8.report.loss_curves import loss
from foundry_fp8.report.panels import fp8_health, guard, mfu

__all__ = ["FIGURES", "FigureSpec"]


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


FIGURES: tuple[FigureSpec, ...] = (
    FigureSpec(
        name="loss",
        title="Loss",
        caption="Mean over the last 2 % of the steps (thin: each step). Below: how much higher the smoothed loss is "
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
        without="Needs at least three steps of a run that is not emulated.",
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
        without="Not evaluated. Give icl_tasks in the YAML, as LLM Foundry has them.",
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
        caption="Per token, mean over tokens. Layers upwards, measurements to the right, one logarithmic colour scale. Outliers that grow show as a layer that "
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
        caption="Relative error of the gradients of each block in FP8, against high precision on the same batch. Blocks upwards, measurements to "
        "the right, one logarithmic colour scale. A triangle that points down: a layer of the block was demoted; up: it returned to FP8.",
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
