"""Reading the runs that are to be compared, whatever wrote them, and giving them names that differ."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from foundry_fp8.config import nearest
from foundry_fp8.report.run import Run
from foundry_fp8.report.sources import (
    csv_table,
    mlflow_store,
    run_log,
    tensorboard_events,
    trainer_state,
    wandb_offline,
)
from foundry_fp8.report.sources.lines import plain_text

__all__ = ["Run", "read_run", "read_runs"]

KINDS = "run_log.jsonl, W&B's *.wandb, TensorBoard's event files, an MLflow store, Trainer's trainer_state.json, or a CSV with step and loss"


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read every run at or below the paths.

    A folder with run logs below it (or with the checkpoints of Hugging Face's Trainer) is read as those alone, because a tracker's copy would be the same runs again. A run is
    called by its ``run_name``; where that is missing or not unique, by the shortest tail of its folder that is.

    Raises:
        FileNotFoundError: No such path, or nothing in it that is a run; names a sibling of nearly that name.
        ValueError: A file that is no run, or that a newer version wrote.
        ImportError: What a tracker's file needs is not installed.
    """
    runs = [run for path in paths for run in _read(path)]
    names = [run.name for run in runs]
    folders = [
        run.path.resolve().parent if run.path.name == run_log.FILE_NAME else run.path.resolve()
        for run in runs
    ]
    for run, folder in zip(runs, folders, strict=True):
        if names.count(run.name) > 1:
            for depth in range(1, len(folder.parts)):
                tail = folder.parts[-depth:]
                if sum(other.parts[-depth:] == tail for other in folders) == 1:
                    run.name = plain_text("/".join(tail))
                    break
            else:
                run.name = plain_text(str(folder))
    taken: dict[str, int] = {}
    for run in runs:  # several in one file may still be called alike
        taken[run.name] = taken.get(run.name, 0) + 1
        if taken[run.name] > 1:
            run.name = f"{run.name} ({taken[run.name]})"
    return runs


def read_run(path: Path) -> Run:
    """Read the one run at ``path``. Raises as :func:`read_runs`, and ``ValueError`` for several."""
    runs = _read(path)
    if len(runs) > 1:
        raise ValueError(
            f"{path} holds {len(runs)} runs ({', '.join(run.name for run in runs[:5])}). Name one."
        )
    return runs[0]


def _read(path: Path) -> list[Run]:
    try:
        return _read_kind(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{error.filename or path} cannot be read: {error.strerror}.") from error


def _read_kind(path: Path) -> list[Run]:
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise FileNotFoundError(f"There is no {path}.{nearest(path.name, siblings)}")
    if path.suffix == ".csv":
        return csv_table.read_all(path)
    if path.suffix == ".wandb":
        return [wandb_offline.read(path)]
    if path.suffix in (".db", ".sqlite"):
        return mlflow_store.read_all(path)
    if path.name == trainer_state.FILE_NAME:
        return [trainer_state.read(path)]
    if ".tfevents." in path.name:
        return [tensorboard_events.read(path.parent)]
    return [run_log.read(path)]


def _read_folder(folder: Path) -> list[Run]:
    if logs := sorted(folder.rglob(run_log.FILE_NAME)):
        return [run_log.read(log) for log in logs]
    if states := trainer_state.find(folder):  # Trainer's own trackers would be the same runs again
        return [trainer_state.read(state) for state in states]
    found = [wandb_offline.read(file) for file in sorted(folder.rglob("*.wandb"))]
    folders = {file.parent for file in folder.rglob("events.out.tfevents.*")}  # one run each
    found += [tensorboard_events.read(where) for where in sorted(folders)]
    found += [run for store in mlflow_store.find(folder) for run in mlflow_store.read_all(store)]
    found += [run for file in csv_table.find(folder) for run in csv_table.read_all(file)]
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no run ({KINDS}). A run writes its log with loggers: {{run_log: {{}}}}."
        )
    return found
