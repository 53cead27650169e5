"""Reading run logs: what ``run_log`` wrote, whole or cut off, as arrays.

Reads JSON lines with the standard library and NumPy alone, so that logs can be compared on a machine that cannot
train. Nothing in a log is fatal but the absence of any line that can be read: what is missing is said in
:attr:`Run.problems` and the rest is used.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from foundry_fp8.config import nearest

__all__ = ["Run", "Series", "Table", "read_run", "read_runs"]

FILE_NAME = "run_log.jsonl"
HIGH_PRECISION = "high precision"
WARM_UP_SHARE = 0.1
NOT_ARCHITECTURE = {
    *(
        "activation_checkpointing_target",
        "additional_eval_metrics",
        "additional_train_metrics",
        "attn_implementation",
    ),
    *("attn_impl", "fc_type", "init_device", "loss_fn", "peft_config", "pretrained", "should_save_peft_only"),
    *("use_auth_token", "use_flash_attention_2", "use_train_metrics", "verbose"),
}
"""Keys under ``model`` that say how it is built, watched or run."""
FINAL_SHARE = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One metric over a run; logged at some of its steps."""

    steps: np.ndarray
    """[n] int64, increasing: batches done when the value was logged."""
    values: np.ndarray
    """[n] float64; NaN and Inf as they were logged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table that a callback logged."""

    name: str
    columns: list[str]
    rows: list[list[Any]]


@dataclasses.dataclass(kw_only=True)
class Run:
    """One run, as its log tells it."""

    name: str
    """What to call it; unique among the runs read together."""
    path: Path
    """The log file."""
    header: dict[str, Any]
    """The last header line; empty if the log has none."""
    step: np.ndarray
    """[n] batches done, increasing."""
    loss: np.ndarray
    """[n] training loss of each batch, NaN where it was not logged."""
    seconds: np.ndarray
    """[n] training time so far, in seconds, without evaluation."""
    tokens: np.ndarray
    """[n] tokens so far, on all devices."""
    host_peak_bytes: np.ndarray
    """[n] largest resident size so far of rank 0's process, NaN where it was not logged."""
    metrics: dict[str, Series]
    """Every scalar metric of the batch lines by its key."""
    evals: dict[str, Series]
    """Every scalar metric of the eval lines by its key."""
    tables: list[Table]
    status: str
    """``finished``, ``stopped...``, or ``unknown`` where the log was cut off."""
    precisions: tuple[str, ...]
    """What it ran in, in the order of its starts."""
    problems: list[str]
    """What could not be read or is missing, in sentences."""

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """LLM Foundry's resolved configuration and whatever else was logged as hyperparameters."""
        return self.header.get("hyperparameters") or {}

    @property
    def conversion(self) -> dict[str, Any] | None:
        """The ``fp8`` algorithm's report (of what ran, once a batch has), or ``None`` for a run in high precision."""
        found = self.hyperparameters.get("fp8_as_run", self.hyperparameters.get("fp8"))
        return found if isinstance(found, Mapping) else None  # type: ignore[return-value]

    @property
    def recipe(self) -> str:
        """The recipe's name, with ``FP8DPA`` where attention's GEMMs ran in FP8 too; or ``high precision``. Several, joined
        by "then", where a resume changed it.
        """
        return " then ".join(self.precisions) or HIGH_PRECISION

    @property
    def backend(self) -> str | None:
        """Who ran the FP8 GEMMs; ``None`` for a run in high precision."""
        return None if self.conversion is None else str(self.conversion.get("backend", "unknown"))

    @property
    def devices(self) -> int:
        """Ranks of the run."""
        return int(self.header.get("world_size") or 1)

    @property
    def nodes(self) -> int:
        """Machines of the run."""
        return int(self.header.get("nodes") or 1)

    def same_model(self, other: Run) -> bool:
        """Whether both train one architecture: as many parameters, and no architectural key of ``model`` that differs."""
        if (
            None not in (mine := self.header.get("parameters"), theirs := other.header.get("parameters"))
            and mine != theirs
        ):
            return False
        here, there = _architecture(self.hyperparameters), _architecture(other.hyperparameters)
        return not here or not there or here == there

    @property
    def final_loss(self) -> float:
        """Mean loss over the last 10 % of the steps (at least one); NaN if any of them is, or if there are none."""
        count = max(1, round(len(self.loss) * FINAL_SHARE))
        return float(np.mean(self.loss[-count:])) if len(self.loss) else math.nan

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens a second and device, after the first 10 % of the steps (warm-up); NaN with fewer than 3 steps."""
        skip = max(1, round(len(self.step) * WARM_UP_SHARE))
        if len(self.step) < skip + 2:
            return math.nan
        elapsed = self.seconds[-1] - self.seconds[skip]
        return (
            float((self.tokens[-1] - self.tokens[skip]) / elapsed / self.devices) if elapsed > 0 else math.nan
        )

    def eval_loss(self) -> float:
        """The last logged cross entropy on held-out data, NaN if there was no evaluation."""
        for key, series in self.evals.items():
            if key.endswith("CrossEntropy") and len(series.values):
                return float(series.values[-1])
        return math.nan

    def matching(self, prefix: str) -> dict[str, Series]:
        """The metrics whose key starts with ``prefix``."""
        return {key: series for key, series in self.metrics.items() if key.startswith(prefix)}


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read several runs and give them names that differ.

    A run is called by its ``run_name``; where that is missing or not unique, by the shortest tail of its folder that is.
    """
    runs = [read_run(path) for path in paths]
    names = [run.name for run in runs]
    folders = [
        run.path.resolve().parent if run.path.name == FILE_NAME else run.path.resolve() for run in runs
    ]
    for run, folder in zip(runs, folders, strict=True):
        if names.count(run.name) > 1:
            for depth in range(1, len(folder.parts)):
                tail = folder.parts[-depth:]
                if sum(other.parts[-depth:] == tail for other in folders) == 1:
                    run.name = "/".join(tail)
                    break
            else:
                run.name = str(folder)
    return runs


def read_run(path: Path) -> Run:
    """Read one log.

    Args:
        path: The file, or a folder that holds one ``run_log.jsonl``, at any depth.

    Raises:
        FileNotFoundError: No such file or no log in the folder; names a sibling of nearly that name.
        ValueError: The folder holds several logs, or the file has no line that can be read.
    """
    file = _find(path)
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
    precisions = [_precision(start) for _, start in started_as]
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


def _precision(header: Mapping[str, Any]) -> str:
    """The recipe's name, with ``FP8DPA`` where attention's GEMMs ran in FP8 too; or ``high precision``."""
    conversion = (header.get("hyperparameters") or {}).get("fp8")
    if not isinstance(conversion, Mapping):
        return HIGH_PRECISION
    recipe = conversion.get("recipe")
    name = str(recipe.get("name", "fp8")) if isinstance(recipe, Mapping) else str(recipe)
    attention = (row.get("action") for row in conversion.get("attention") or [])
    return f"{name}, FP8DPA" if "converted" in attention else name


def _architecture(hyperparameters: Mapping[str, Any]) -> Any:
    def kept(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            key: kept(item) for key, item in value.items() if key not in NOT_ARCHITECTURE and item is not None
        }

    return kept(hyperparameters.get("model") or {})


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if path.is_dir():
        found = sorted(path.rglob(FILE_NAME))
        if len(found) > 1:
            shown = ", ".join(str(file.relative_to(path)) for file in found[:5])
            raise ValueError(f"{path} holds {len(found)} logs ({shown}). Name the runs one by one.")
        if found:
            return found[0]
        raise FileNotFoundError(
            f"{path} holds no {FILE_NAME}. Was the run started with loggers: {{run_log: {{}}}}?"
        )
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise FileNotFoundError(f"There is no {path}.{nearest(path.name, siblings)}")


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
