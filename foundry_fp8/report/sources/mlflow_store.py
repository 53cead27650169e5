"""MLflow stores: folders through MLflow's own library; SQLite files read as they are, which it would migrate."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from foundry_fp8.report.run import Run
from foundry_fp8.report.sources.tracked import LOSS, run_of

__all__ = ["find", "read_all"]


def find(folder: Path) -> list[Path]:
    """The stores below ``folder``: ``mlruns`` folders (or itself) and ``mlflow.db`` files."""
    runs = (file.parent for file in folder.rglob("*/*/meta.yaml") if (file.parent / "metrics").is_dir())
    return sorted({*(run.parent.parent for run in runs), *folder.rglob("mlflow.db")})


def read_all(store: Path) -> list[Run]:
    """Read the training runs of a store. Raises ``ImportError`` without MLflow."""
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise ImportError(
            f"{store} is a store of MLflow, and reading it needs `pip install mlflow-skinny`. Found: {error}."
        ) from error
    if store.is_file():
        return _read_database(store)
    client: Any = MlflowClient(tracking_uri=store.resolve().as_uri())
    found = []
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]):
            if LOSS not in run.data.metrics:
                continue  # an evaluation, or somebody else's
            history = [p for key in run.data.metrics for p in client.get_metric_history(run.info.run_id, key)]
            points = [(point.key, point.step, point.value, point.timestamp) for point in history]
            found.append(_run(store, run.info.run_name, run.info.status, points, run.data.params))
    return found


def _read_database(file: Path) -> list[Run]:
    """Without a lock, and without a file beside it, unless somebody is writing to it now."""
    alone = "" if file.with_name(f"{file.name}-wal").exists() else "&immutable=1"
    where, found = f"{file.resolve().as_uri()}?mode=ro{alone}", []
    runs = "SELECT run_uuid, name, status FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time"
    points_of = "SELECT key, step, CASE is_nan WHEN 1 THEN 'nan' ELSE value END, timestamp FROM metrics WHERE run_uuid = ?"
    try:
        with contextlib.closing(sqlite3.connect(where, uri=True)) as base:
            for number, name, status in base.execute(runs).fetchall():
                logged = base.execute(points_of, [number])
                points = [(key, step, float(value), at) for key, step, value, at in logged]
                params = dict(base.execute("SELECT key, value FROM params WHERE run_uuid = ?", [number]))
                if any(key == LOSS for key, *_ in points):
                    found.append(_run(file, name, status, points, params))
            return found
    except sqlite3.Error as error:
        raise ValueError(f"{file} cannot be read as a database of MLflow: {error}.") from error


def _run(
    store: Path, name: str, status: str, points: Iterable[tuple[str, int, float, int]], params: dict[str, str]
) -> Run:
    """Of a run's points: key, step, value, milliseconds."""
    metrics: dict[str, dict[int, float]] = {}
    clock: dict[int, float] = {}
    for key, step, value, milliseconds in points:
        metrics.setdefault(key, {})[step] = value
        if key == LOSS:
            clock[step] = milliseconds / 1000
    ended = "finished" if status == "FINISHED" else f"stopped: {status}"
    return run_of(name, store, metrics, params, clock=clock, status=ended)
