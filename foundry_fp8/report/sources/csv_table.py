"""Runs from a CSV of anybody's: one line a step.

Columns: ``step`` and ``loss``; and where there are such, ``run`` (several runs in one file), ``tokens`` and ``seconds`` (so far),
``precision`` (``bf16``, ``delayed``, ``current``, ``block``, ``mxfp8``, ...), ``devices``, ``nodes``, ``parameters``. Any other
column is a metric.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from foundry_fp8.numerics.recipes import RECIPES
from foundry_fp8.report.run import Run, Series, recipe_of

__all__ = ["find", "read_all"]

OWN = ("step", "loss", "run", "tokens", "seconds", "precision", "devices", "nodes", "parameters")


def find(folder: Path) -> list[Path]:
    """The CSV files in ``folder`` itself that have the two columns."""
    return [file for file in sorted(folder.glob("*.csv")) if {"step", "loss"} <= set(_columns(file))]


def read_all(file: Path) -> list[Run]:
    """Read every run of a file. Raises ``ValueError`` where it lacks a column or holds no number in one."""
    columns = _columns(file)
    missing = [name for name in ("step", "loss") if name not in columns]
    if missing:
        raise ValueError(f"{file} has no column {missing[0]!r} (it has {', '.join(columns) or 'none'}).")
    lines: dict[str, list[dict[str, str]]] = {}
    with file.open(encoding="utf-8", newline="") as text:
        for line in csv.DictReader(text):
            lines.setdefault(line.get("run") or file.stem, []).append(line)
    if not lines:
        raise ValueError(f"{file} has no line below its header.")
    return [_run(name, file, found) for name, found in lines.items()]


def _run(name: str, file: Path, lines: list[dict[str, str]]) -> Run:
    def column(key: str) -> np.ndarray:
        try:
            return np.array([float(line.get(key) or "nan") for line in lines])
        except ValueError as error:
            raise ValueError(f"{file}, run {name}, column {key!r}: {error}.") from error

    first: dict[str, Any] = lines[0]
    precision = first.get("precision") or "precision not given"
    config: dict[str, Any] = {}
    if precision in RECIPES:
        config["fp8"] = {"recipe": {"name": precision}, "backend": "as given"}
    header = {
        "run_name": name,
        "precision": precision,
        "world_size": int(first.get("devices") or 1),
        "nodes": int(first.get("nodes") or 1),
        "parameters": int(float(first["parameters"])) if first.get("parameters") else None,
        "hyperparameters": config,
    }
    steps = column("step")
    if not np.isfinite(steps).all():
        raise ValueError(f"{file}, run {name}: a line has no step.")
    metrics = {key: column(key) for key in first if key and key not in OWN}
    return Run(
        name=name,
        path=file,
        header=header,
        step=steps.astype(np.int64),
        loss=column("loss"),
        seconds=column("seconds"),
        tokens=column("tokens"),
        host_peak_bytes=np.full(len(steps), np.nan),
        metrics={key: Series(steps=steps.astype(np.int64), values=values) for key, values in metrics.items()},
        evals={},
        tables=[],
        status="finished",
        precisions=(recipe_of(header),),
        problems=[],
    )


def _columns(file: Path) -> list[str]:
    with file.open(encoding="utf-8", errors="replace", newline="") as text:
        return next(csv.reader(text), [])
