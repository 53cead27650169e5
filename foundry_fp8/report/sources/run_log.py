"""Logs that ``run_log`` wrote, whole or cut off.

Reads JSON lines with the standard library and NumPy alone, so that logs can be compared on a machine that cannot train.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from foundry_fp8.report.run import Run, Series, Table, recipe_of

__all__ = ["FILE_NAME", "find", "read"]

FILE_NAME = "run_log.jsonl"
FORMAT_VERSION = 1
"""The newest that is known here (``callbacks/run_log.py`` writes it)."""


def find(folder: Path) -> list[Path]:
    """The logs below ``folder``."""
    return sorted(folder.rglob(FILE_NAME))


def read(file: Path) -> Run:
    """Read one log.

    Nothing in it is fatal but the absence of any line that can be read: what is missing is said in :attr:`Run.problems`.

    Raises:
        ValueError: No line can be read, or a newer version wrote them.
    """
    header: dict[str, Any] = {}
    batches: list[dict[str, Any]] = []
    evals: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    tables: dict[str, Table] = {}
    status = "unknown"
    problems: list[str] = []
    unreadable: list[int] = []
    started_as: list[tuple[int, dict[str, Any]]] = []
    count = 0
    for number, line in _lines(file):
        count += 1
        if line is None:
            unreadable.append(number)
            continue
        kind = line.get("kind")
        if kind == "header":
            version = line.get("format_version", FORMAT_VERSION)
            if not isinstance(version, int) or version > FORMAT_VERSION:
                raise ValueError(
                    f"{file} was written by a newer foundry-fp8 (format {version}; this one reads up to {FORMAT_VERSION}): "
                    "compare it with that one."
                )
            resumed_at = int(line.get("step") or 0)
            # A resumed run repeats the steps after its checkpoint: the repetition counts.
            batches = [batch for batch in batches if batch["step"] <= resumed_at]
            evals = [entry for entry in evals if entry["step"] <= resumed_at]
            others = [entry for entry in others if entry["step"] < resumed_at]
            if resumed_at == 0 and header:
                problems.append("It was started again under the same name: what came before is left out.")
                started_as.clear()
            # A start knows its whole configuration: nothing of an earlier one is carried over.
            header = {**line, "hyperparameters": dict(line.get("hyperparameters") or {})}
            started_as.append((resumed_at, header))
            status = "unknown"
        elif kind == "batch" and isinstance(line.get("step"), int):
            batches.append(line)
        elif kind == "eval" and isinstance(line.get("step"), int):
            evals.append(line)
        elif kind == "metrics" and isinstance(line.get("step"), int):
            others.append(line)
        elif kind == "hparams" and isinstance(line.get("values"), dict):
            header.setdefault("hyperparameters", {}).update(line["values"])
        elif kind == "table":
            name = str(line.get("name"))
            tables[name] = Table(name=name, columns=line.get("columns") or [], rows=line.get("rows") or [])
        elif kind == "end":
            status = str(line.get("status"))
    if count == len(unreadable):
        raise ValueError(f"{file} is not a run log: none of its {count} lines can be read as one.")
    if unreadable:
        where = ", ".join(map(str, unreadable[:5])) + (", ..." if len(unreadable) > 5 else "")
        problems.append(
            f"{len(unreadable)} of {count} lines cannot be read (line {where}); they are left out."
        )
    if not header:
        problems.append("The log has no header: configuration, device and precision are not known.")
    if status == "unknown":
        problems.append("The log has no last line: the run was killed or goes on; what follows is partial.")
    elif status != "finished":
        problems.append(f"The run did not finish ({status}); what follows is partial.")
    if not batches:
        problems.append("No step was logged.")
    precisions = [recipe_of(start) for _, start in started_as]
    if len(set(precisions)) > 1:
        steps = ", ".join(
            f"{name} from step {step}" for (step, _), name in zip(started_as, precisions, strict=True)
        )
        problems.append(f"Its precision changed when it was resumed ({steps}): its figures mix them.")
    loss = _column(batches, "loss")
    if len(loss) and not np.isfinite(loss).all():
        first = int(np.flatnonzero(~np.isfinite(loss))[0])
        number_of = int((~np.isfinite(loss)).sum())
        problems.append(
            f"The loss is not finite in {number_of} steps, first in step {batches[first]['step']}."
        )
    return Run(
        name=str(header.get("run_name") or file.parent.name),
        path=file,
        header=header,
        step=np.array([batch["step"] for batch in batches], dtype=np.int64),
        loss=loss,
        seconds=_column(batches, "seconds"),
        tokens=_column(batches, "tokens"),
        host_peak_bytes=_column(batches, "host_peak_bytes"),
        metrics=_series(sorted([*batches, *others], key=lambda line: line["step"])),
        evals=_series(evals),
        tables=list(tables.values()),
        status=status,
        problems=problems,
        precisions=tuple(dict.fromkeys(precisions)),
    )


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield ``(line number, object)``, with ``None`` for a line that is not one JSON object."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                line = None
            yield number, line if isinstance(line, dict) else None


def _number(value: Any) -> float:
    """A logged value as a float: the strings nan, inf and -inf too; NaN for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _column(lines: list[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([_number(line.get(key)) for line in lines], dtype=np.float64)


def _series(lines: list[dict[str, Any]]) -> dict[str, Series]:
    steps: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    for line in lines:
        for key, value in (line.get("metrics") or {}).items():
            if isinstance(value, (int, float)) or value in ("nan", "inf", "-inf"):
                steps.setdefault(key, []).append(line["step"])
                values.setdefault(key, []).append(_number(value))
    return {
        key: Series(steps=np.array(steps[key], dtype=np.int64), values=np.array(values[key])) for key in steps
    }
