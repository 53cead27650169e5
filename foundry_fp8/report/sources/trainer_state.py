"""A run from the ``trainer_state.json`` that Hugging Face's Trainer writes into each checkpoint: its log history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from foundry_fp8.report.run import Run, Series, recipe_of

__all__ = ["FILE_NAME", "find", "read"]

FILE_NAME = "trainer_state.json"
EVAL_LOSS = "metrics/eval/LanguageCrossEntropy"
"""What a report knows the loss of an evaluation by."""
NOT_A_METRIC = ("loss", "step", "epoch", "num_input_tokens_seen")


def find(folder: Path) -> list[Path]:
    """The file of the latest checkpoint of each run: of ``folder`` itself, and of the folders in it."""
    found = []
    for run in (folder, *sorted(inner for inner in folder.iterdir() if inner.is_dir())):
        files = [run / FILE_NAME, *run.glob(f"checkpoint-*/{FILE_NAME}")]
        there = [file for file in files if file.is_file() and not (run != folder and _is_checkpoint(run))]
        if there:
            found.append(max(there, key=lambda file: (_number(file.parent), str(file))))
    return found


def read(file: Path) -> Run:
    """The run.

    Raises:
        ValueError: It is no such file, or holds no training loss.
    """
    try:
        state: Any = json.loads(file.read_text(encoding="utf-8"))
        history = [entry for entry in state["log_history"] if "step" in entry]
        asked = (state.get("stateful_callbacks") or {}).get("FP8Callback", {}).get("args")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no {FILE_NAME} of Hugging Face's Trainer: {error!r}") from error
    lines = [entry for entry in history if "loss" in entry]
    if not lines:
        raise ValueError(f"{file} holds no training loss: nothing was logged yet (logging_steps).")
    of_run = file.parent.parent if _is_checkpoint(file.parent) else file.parent
    config: dict[str, Any] = {}
    if asked and asked.get("enabled", True):
        recipe = asked.get("recipe", "auto")
        config["fp8"] = {
            "recipe": recipe if isinstance(recipe, dict) else {"name": recipe},
            "backend": "not logged",
        }
    name = of_run.resolve().name
    header = {
        "run_name": name,
        "hyperparameters": config,
        "precision": "precision not logged",
    }
    tokens = [float(entry.get("num_input_tokens_seen", "nan")) for entry in lines]
    problems = ["Trainer logs no time of its steps, so there is no speed."]
    if np.isnan(tokens).all():
        problems.append("No tokens were counted (include_num_input_tokens_seen).")
    return Run(
        name=name,
        path=file,
        header=header,
        step=np.array([entry["step"] for entry in lines], dtype=np.int64),
        loss=np.array([entry["loss"] for entry in lines], dtype=np.float64),
        seconds=np.full(len(lines), np.nan),
        tokens=np.array(tokens),
        host_peak_bytes=np.full(len(lines), np.nan),
        metrics=_series(lines),
        evals=_series([entry for entry in history if any(key.startswith("eval_") for key in entry)]),
        tables=[],
        status="finished" if state.get("global_step") == state.get("max_steps") else "unknown",
        precisions=(recipe_of(header),),
        problems=problems,
    )


def _series(entries: list[dict[str, Any]]) -> dict[str, Series]:
    found: dict[str, dict[int, float]] = {}
    for entry in entries:
        for key, value in entry.items():
            if isinstance(value, int | float) and key not in NOT_A_METRIC:
                found.setdefault(EVAL_LOSS if key == "eval_loss" else key, {})[entry["step"]] = float(value)
    return {
        key: Series(steps=np.array([*by_step], dtype=np.int64), values=np.array([*by_step.values()]))
        for key, by_step in found.items()
    }


def _is_checkpoint(folder: Path) -> bool:
    return _number(folder) >= 0


def _number(folder: Path) -> int:
    """Of ``checkpoint-500``; -1 for another folder."""
    name, _, number = folder.name.rpartition("-")
    return int(number) if name == "checkpoint" and number.isdecimal() else -1
