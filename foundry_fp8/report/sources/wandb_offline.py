"""W&B runs that were logged offline, through W&B's own library."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from foundry_fp8.compat.wandb_offline import records
from foundry_fp8.report.run import Run
from foundry_fp8.report.sources.lines import number, parse, whole
from foundry_fp8.report.sources.tracked import run_of

__all__ = ["read"]


def read(file: Path) -> Run:
    """Read one run. Raises ``ImportError`` without W&B, ``ValueError`` where there is no training in it."""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    clock: dict[int, float] = {}
    config: dict[str, Any] = {}
    name, status = file.stem, "unknown"
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            name = record.run.display_name or name
            config |= _items(record.run.config.update)
        elif kind == "config":
            config |= _items(record.config.update)
        elif kind == "exit":
            status = (
                "finished" if record.exit.exit_code == 0 else f"stopped: exit code {record.exit.exit_code}"
            )
        elif kind == "history":
            row = _items(record.history.item)
            with contextlib.suppress(ValueError):
                step = whole(row.get("_step", record.history.step.num))
                for key, value in row.items():
                    with contextlib.suppress(ValueError):
                        if key == "_timestamp":
                            clock[step] = number(value)
                        elif not key.startswith("_"):
                            points[key][step] = number(value)
    return run_of(name, file, points, config, clock=clock, status=status)


def _items(items: Any) -> dict[str, Any]:
    found = {}
    for item in items:
        with contextlib.suppress(ValueError):
            found[item.key or "/".join(item.nested_key)] = parse(item.value_json)
    return found
