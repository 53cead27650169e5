"""A run from the ``trainer_state.json`` that Hugging Face's Trainer writes into each checkpoint: its log history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foundry_fp8.report.run import Run
from foundry_fp8.report.sources.build import build
from foundry_fp8.report.sources.lines import number, parse, whole

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
        state: Any = parse(file.read_text(encoding="utf-8-sig", errors="replace"))
        entries = list(state["log_history"])
        asked = (state.get("stateful_callbacks") or {}).get("FP8Callback", {}).get("args")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no {FILE_NAME} of Hugging Face's Trainer: {error!r}") from error
    history, unreadable = [], []
    for place, entry in enumerate(entries, start=1):
        try:
            number(entry.get("loss", 0.0))
            history.append({**entry, "step": whole(entry.get("step"))})
        except (AttributeError, ValueError):
            unreadable.append(place)
    lines = [entry for entry in history if "loss" in entry]
    if not lines:
        raise ValueError(f"{file} holds no training loss: nothing was logged yet (logging_steps).")
    of_run = file.parent.parent if _is_checkpoint(file.parent) else file.parent
    config: dict[str, Any] = {}
    if isinstance(asked, dict) and asked and asked.get("enabled", True):
        recipe = asked.get("recipe", "auto")
        recipe = recipe if isinstance(recipe, dict) else {"name": recipe}
        config["fp8"] = {"recipe": recipe, "backend": "not logged"}
    name = of_run.resolve().name
    problems = ["Trainer logs no time of its steps, so there is no speed."]
    if all(entry.get("num_input_tokens_seen") is None for entry in lines):
        problems.append("No tokens were counted (include_num_input_tokens_seen).")
    batches = [{**e, "tokens": e.get("num_input_tokens_seen"), "metrics": _metrics(e)} for e in lines]
    evaluated = (e for e in history if any(key.startswith("eval_") for key in e))
    return build(
        {"run_name": name, "hyperparameters": config, "precision": "precision not logged"},
        batches,
        evals=[{"step": entry["step"], "metrics": _metrics(entry)} for entry in evaluated],
        name=name,
        path=file,
        status="finished" if state.get("global_step") == state.get("max_steps") else "unknown",
        problems=problems,
        unreadable=(unreadable, len(entries)),
    )


def _metrics(entry: dict[str, Any]) -> dict[str, Any]:
    return {EVAL_LOSS if key == "eval_loss" else key: entry[key] for key in entry if key not in NOT_A_METRIC}


def _is_checkpoint(folder: Path) -> bool:
    return _number(folder) >= 0


def _number(folder: Path) -> int:
    """Of ``checkpoint-500``; -1 for another folder."""
    name, _, number = folder.name.rpartition("-")
    return int(number) if name == "checkpoint" and number.isdecimal() else -1
