"""What is compared across runs rather than over steps: speed over devices, FLOP/s and MFU by model size, scores of tasks.

The numbers alone; ``figures_across.py`` draws them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from foundry_fp8.report.comparison import Row
from foundry_fp8.report.run import HIGH_PRECISION

__all__ = ["BY_SIZE", "Group", "by_size", "over_devices", "scored", "speeds"]

BY_SIZE = (("tflops_per_device", "TFLOP/s of a device", 1.0), ("mfu", "MFU (%)", 100.0))
"""Of figure by size: field of a row, label, factor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of one model in one precision."""

    model: str
    recipe: str
    rows: list[Row]
    """By devices."""


def speeds(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """The rows whose speed says something: not emulation's, nor that of its baselines where nothing else has one."""
    shown = [
        (i, row)
        for i, row in enumerate(rows)
        if np.isfinite(row.tokens_per_second_per_device) and row.run.backend != "emulated"
    ]
    alone = all(row.run.recipe == HIGH_PRECISION for _, row in shown)
    return [] if alone and any(row.run.backend for row in rows) else shown


def over_devices(rows: Sequence[Row]) -> list[Group]:
    """Speeds by devices, one group a line; empty where all runs had as many devices."""
    shown = [row for _, row in speeds(rows)]
    return [] if len({row.run.devices for row in shown}) < 2 else _grouped(shown)


def by_size(rows: Sequence[Row]) -> list[Group]:
    """One run a model and precision, on the most devices, models from small to large; empty for a single model.

    The figures of Databricks: FLOP/s and MFU by model size and precision. Source:
    https://www.databricks.com/blog/turbocharged-training-optimizing-databricks-mosaic-ai-stack-fp8, figures 1 and 2.
    """
    shown = [
        row
        for row in rows
        if row.run.backend != "emulated" and any(np.isfinite(getattr(row, field)) for field, _, _ in BY_SIZE)
    ]

    def size(row: Row) -> float:
        return row.run.header.get("parameters") or 0

    shown.sort(key=lambda row: (size(row), row.run.recipe != HIGH_PRECISION))  # baselines first
    groups = [dataclasses.replace(group, rows=group.rows[-1:]) for group in _grouped(shown)]
    return groups if len({group.model for group in groups}) > 1 else []


def scored(rows: Sequence[Row]) -> tuple[list[str], list[tuple[int, Row]]]:
    """The downstream tasks that any run was evaluated on, and the runs that were."""
    shown = [(i, row) for i, row in enumerate(rows) if row.scores]
    return list(dict.fromkeys(task for _, row in shown for task in row.scores)), shown


def _grouped(shown: Sequence[Row]) -> list[Group]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in shown:
        groups.setdefault((row.run.model, row.run.recipe), []).append(row)
    return [
        Group(model=model, recipe=recipe, rows=sorted(found, key=lambda row: row.run.devices))
        for (model, recipe), found in groups.items()
    ]
