"""A run from what a tracker kept of it: metrics by key and step, and hyperparameters.

Composer's loggers give trackers the same keys: ``loss/train/total`` at each batch, ``time/token`` when it begins,
``wall_clock/train`` (hours, if ``speed_monitor`` is on) when it ends. Trackers count steps from 0, run logs batches done.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from foundry_fp8.report.run import Run
from foundry_fp8.report.sources.build import build
from foundry_fp8.report.sources.lines import clean, parse

__all__ = ["LOSS", "Points", "run_of"]

LOSS, TOKENS, HOURS = "loss/train/total", "time/token", "wall_clock/train"
Points = Mapping[str, Mapping[int, float]]
"""By key, then by the tracker's step."""


def run_of(
    name: str,
    path: Path,
    points: Points,
    hyperparameters: Mapping[str, Any],
    *,
    clock: Mapping[int, float] | None = None,
    status: str = "unknown",
) -> Run:
    """The run.

    ``clock`` has seconds at each step by the tracker's own clock, for want of training time; hyperparameters may be text.

    Raises:
        ValueError: There is no training loss in it.
    """
    if not points.get(LOSS):
        raise ValueError(f"{path} holds no {LOSS}: it is no training run of Composer.")
    config = {key: _plain(value) for key, value in hyperparameters.items()}
    steps = sorted(points[LOSS])
    problems: list[str] = []
    hours = points.get(HOURS) or {}
    if hours:
        seconds = [3600 * hours.get(step, np.nan) for step in steps]
    else:
        seconds = [(clock or {}).get(step, np.nan) for step in steps]
        problems.append(
            f"No {HOURS} (speed_monitor logs it): its time is the tracker's own, evaluation and saving included."
        )
    devices = config.get("n_gpus")
    if not isinstance(devices, int):
        problems.append("How many devices it ran on was not logged: it is taken for one.")
        devices = 1
    header = {
        "run_name": name,
        "hyperparameters": config,
        "world_size": devices,
        "nodes": max(1, devices // 8),  # not logged; LLM Foundry's clusters have 8 devices a node
        "precision": config.get("precision", "precision not logged"),
        "parameters": config.get("n_params"),
    }
    tokens = points.get(TOKENS, {})
    batches = [
        {"step": step + 1, "loss": points[LOSS][step], "seconds": time, "tokens": tokens.get(step)}
        for step, time in zip(steps, seconds, strict=True)
    ]
    lines: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for key, values in points.items():
        if key != LOSS:
            of_eval = key.startswith("metrics/eval")
            lines[of_eval] += [{"step": step + 1, "metrics": {key: value}} for step, value in values.items()]
    return build(header, batches, others=lines[False], evals=lines[True], problems=problems,
                 name=name, path=path, status=status)  # fmt: skip


def _plain(value: Any) -> Any:
    """A hyperparameter that a tracker kept as text, as what it was."""
    if not isinstance(value, str):
        return clean(value)
    for read in (parse, ast.literal_eval):
        try:
            return clean(read(value))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return clean(value)
