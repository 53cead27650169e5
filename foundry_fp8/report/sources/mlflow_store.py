"""MLflow stores, folders or SQLite files, through MLflow's own library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foundry_fp8.report.run import Run
from foundry_fp8.report.sources.tracked import run_of

__all__ = ["find", "read_all"]


def find(folder: Path) -> list[Path]:
    """The stores below ``folder``: ``mlruns`` folders (or itself) and ``mlflow.db`` files."""
    inside = {
        file.parent.parent.parent
        for file in folder.rglob("*/*/meta.yaml")
        if (file.parent / "metrics").is_dir()
    }
    return sorted({*inside, *folder.rglob("mlflow.db")})


def read_all(store: Path) -> list[Run]:
    """Read the training runs of a store. Raises ``ImportError`` without MLflow."""
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise ImportError(
            f"{store} is a store of MLflow, and reading it needs `pip install mlflow-skinny`. Found: {error}."
        ) from error
    where = f"sqlite:///{store.resolve()}" if store.is_file() else store.resolve().as_uri()
    client: Any = MlflowClient(tracking_uri=where)
    found = []
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]):
            if "loss/train/total" not in run.data.metrics:
                continue  # an evaluation, or somebody else's
            points: dict[str, dict[int, float]] = {}
            clock: dict[int, float] = {}
            for key in run.data.metrics:
                history = client.get_metric_history(run.info.run_id, key)
                points[key] = {point.step: point.value for point in history}
                if key == "loss/train/total":
                    clock = {point.step: point.timestamp / 1000 for point in history}
            status = "finished" if run.info.status == "FINISHED" else f"stopped: {run.info.status}"
            found.append(
                run_of(run.info.run_name, store, points, run.data.params, clock=clock, status=status)
            )
    return found
