"""Runs from a CSV of anybody's: one line a step.

Columns: ``step`` and ``loss``; and where there are such, ``run`` (several runs in one file), ``tokens`` and ``seconds`` (so far),
``precision`` (``bf16``, a recipe's name, or what begins with ``fp8``), ``devices``, ``nodes``, ``parameters``. Any other
column is a metric.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
from pathlib import Path
from typing import Any

from foundry_fp8.numerics.recipes import RECIPES
from foundry_fp8.report.run import Run
from foundry_fp8.report.sources.build import build
from foundry_fp8.report.sources.lines import LARGEST, number, plain_text, text_lines, whole

__all__ = ["find", "read_all"]

OWN = ("step", "loss", "run", "tokens", "seconds", "precision", "devices", "nodes", "parameters")


def find(folder: Path) -> list[Path]:
    """The CSV files in ``folder`` itself that have the two columns."""
    return [file for file in sorted(folder.glob("*.csv")) if {"step", "loss"} <= set(_columns(file))]


def read_all(file: Path) -> list[Run]:
    """Read every run of a file. Raises ``ValueError`` where it lacks a column or no line can be read."""
    columns = _columns(file)
    missing = [name for name in ("step", "loss") if name not in columns]
    if missing:
        raise ValueError(f"{file} has no column {missing[0]!r} (it has {', '.join(columns) or 'none'}).")
    lines: dict[str, list[dict[str, Any]]] = {}
    unreadable: list[int] = []
    why, count = f"{file} has no line below its header.", 0
    for place, text in itertools.islice(text_lines(file), 1, None):
        count += 1
        try:
            cells = _row(text)
            line: dict[str, Any] = dict(zip(columns, cells, strict=False))
            if len(cells) < len(columns) or any(cells[len(columns) :]):
                raise ValueError(f"{len(cells)} cells under {len(columns)} columns")
            line |= {"step": whole(_cell(line, "step")), "loss": _cell(line, "loss")}
            lines.setdefault(line.get("run") or file.stem, []).append(line)
        except (ValueError, csv.Error) as error:
            unreadable.append(place)
            why = f"{file}, line {place}, {error}."
    if not lines:
        raise ValueError(why)
    return [
        _run(name, file, found, (unreadable if name == next(iter(lines)) else [], count))
        for name, found in lines.items()
    ]


def _run(name: str, file: Path, lines: list[dict[str, Any]], unreadable: tuple[list[int], int]) -> Run:
    batches: list[dict[str, Any]] = []
    for line in lines:
        numbers = dict(line)
        for key in line.keys() - {"step", "loss"}:
            with contextlib.suppress(ValueError):
                numbers[key] = _cell(line, key)
        batches.append({**numbers, "metrics": {key: numbers[key] for key in line if key and key not in OWN}})
    precision = lines[0].get("precision") or "precision not given"
    config: dict[str, Any] = {}
    if precision.lower() in RECIPES or precision.lower().startswith("fp8"):
        config["fp8"] = {"recipe": {"name": precision}, "backend": "as given"}
    sizes = {"world_size": "devices", "nodes": "nodes", "parameters": "parameters"}
    header: dict[str, Any] = {"run_name": name, "precision": precision, "hyperparameters": config}
    for key, column in sizes.items():
        value = batches[0].get(column)
        header[key] = int(value) if isinstance(value, float) and math.isfinite(value) else value
    return build(header, batches, name=name, path=file, status="finished", unreadable=unreadable)


def _cell(line: dict[str, Any], key: str) -> float | None:
    """A cell's number, ``None`` for an empty one. Raises ``ValueError`` for what is none."""
    cell = line[key]
    try:
        return number(cell if abs(float(cell)) > LARGEST else float(cell)) if cell else None
    except ValueError as error:
        raise ValueError(f"column {key!r}: could not convert {cell[:20]!r} to a number") from error


def _row(line: str) -> list[str]:
    return [plain_text(cell).strip() for cell in next(csv.reader([line], skipinitialspace=True), [])]


def _columns(file: Path) -> list[str]:
    return _row(next(text_lines(file), (1, ""))[1][:100_000])
