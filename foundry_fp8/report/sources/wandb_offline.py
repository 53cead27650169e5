"""W&B runs that were logged offline, through W&B's own library."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from foundry_fp8.compat.wandb_offline import records
from foundry_fp8.report.run import Run
from foundry_fp8.report.sources.tracked import run_of

__all__ = ["find", "read"]


def find(folder: Path) -> list[Path]:
    """The ``.wandb`` files below ``folder``."""
    return sorted(folder.rglob("*.wandb"))


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
            step = int(row.get("_step", record.history.step.num))
            if "_timestamp" in row:
                clock[step] = float(row["_timestamp"])
            for key, value in row.items():
                if isinstance(value, int | float) and not key.startswith("_"):
                    points[key][step] = float(value)
    return run_of(name, file, points, config, clock=clock, status=status)


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
