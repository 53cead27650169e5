"""One run as arrays, whatever kind of log it was read from."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["FINAL_SHARE", "GUARD_EVENTS", "HIGH_PRECISION", "Run", "Series", "Table", "recipe_of"]

HIGH_PRECISION = "high precision"
WARM_UP_SHARE = 0.1  # of the steps; left out of speeds and means
NOT_ARCHITECTURE = {
    "activation_checkpointing_target", "additional_eval_metrics", "additional_train_metrics", "attn_implementation", "attn_impl",
    "fc_type", "init_device", "loss_fn", "peft_config", "pretrained", "should_save_peft_only", "use_auth_token",
    "use_flash_attention_2", "use_train_metrics", "verbose",
}  # fmt: skip
"""Keys under ``model`` that do not change the architecture: how the model is built, evaluated or run."""
FINAL_SHARE = 0.1  # of the steps; their mean is the final loss
GUARD_EVENTS = "guard_events"
"""The table that the divergence guard logs: batch, unit, action, signal, detail."""
_TASK = re.compile(r"metrics/(.+)/InContextLearning\w*Accuracy")


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
    """One run, from its log."""

    name: str
    """What to call it; unique among the runs read together."""
    path: Path
    """The log file."""
    header: dict[str, Any]
    """The last header line; empty if the log has none."""
    step: np.ndarray
    """[n] batches done, increasing."""
    loss: np.ndarray
    """[n] training loss of each batch, as logged: NaN and Inf too."""
    has_loss: np.ndarray
    """[n] bool, false where no loss was logged (its loss is NaN)."""
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
    tables: list[Table] = dataclasses.field(default_factory=list)
    status: str = "unknown"
    """``finished``, ``stopped...``, or ``unknown`` where the log was cut off."""
    precisions: tuple[str, ...] = ()
    """Its recipes (:func:`recipe_of`), in the order in which starts and resumes first used them."""
    problems: list[str]
    """What could not be read or is missing, in sentences."""

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """LLM Foundry's resolved configuration and whatever else was logged as hyperparameters."""
        return self.header.get("hyperparameters") or {}

    @property
    def conversion(self) -> dict[str, Any] | None:
        """The ``fp8`` algorithm's report (after the first batch: as run), or ``None`` for a run in high precision."""
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

    @property
    def model(self) -> str:
        """The model's name, where the configuration has one, and its size (``7B``); a dash without either."""
        count = self.header.get("parameters")
        size = "" if not isinstance(count, int | float) else _size(float(count))
        named = self.hyperparameters.get("model")
        name = str(named.get("name", "")) if isinstance(named, Mapping) else ""
        return " ".join(part for part in (name.removesuffix("_causal_lm"), size) if part) or "–"

    def same_model(self, other: Run) -> bool:
        """Whether both train one architecture: as many parameters, and no architectural key of ``model`` that differs."""
        mine, theirs = (run.header.get("parameters") for run in (self, other))
        if None not in (mine, theirs) and mine != theirs:
            return False
        here, there = _architecture(self.hyperparameters), _architecture(other.hyperparameters)
        return not here or not there or here == there

    @property
    def final_loss(self) -> float:
        """Mean loss over the last 10 % of the steps (at least one); NaN if any of them is, or if there are none."""
        loss = self.loss[self.has_loss]
        count = max(1, round(len(loss) * FINAL_SHARE))
        with np.errstate(invalid="ignore"):  # inf - inf
            return float(np.mean(loss[-count:])) if len(loss) else math.nan

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens a second and device, after the first 10 % of the steps (warm-up); NaN with fewer than 3 steps."""
        skip = max(1, round(len(self.step) * WARM_UP_SHARE))
        if len(self.step) < skip + 2:
            return math.nan
        done, elapsed = (float(values[-1]) - float(values[skip]) for values in (self.tokens, self.seconds))
        return done / elapsed / self.devices if done > 0 and elapsed > 0 else math.nan

    def eval_loss(self) -> float:
        """The last logged cross entropy on held-out data, NaN if there was no evaluation."""
        for key, series in self.evals.items():
            if key.endswith("CrossEntropy") and len(series.values):
                return float(series.values[-1])
        return math.nan

    @property
    def scores(self) -> dict[str, Series]:
        """Accuracies of LLM Foundry's downstream evaluation, from 0 to 1, by task (``next_line/0-shot``)."""
        found = ((_TASK.fullmatch(key), series) for key, series in {**self.metrics, **self.evals}.items())
        return {key[1]: series for key, series in found if key is not None and len(series.values)}

    @property
    def guard_events(self) -> list[tuple[int, str, str, str, str]]:
        """What the divergence guard found and did, in order: the columns of its table."""
        found = []
        for row in next((table.rows for table in self.tables if table.name == GUARD_EVENTS), []):
            with contextlib.suppress(ValueError, TypeError, OverflowError):  # a row of something else
                batch, unit, action, signal, detail = row
                found.append((int(batch), str(unit), str(action), str(signal), str(detail)))
        return found

    def settled(self, key: str) -> float:
        """Mean of a metric's finite values after the first 10 % of the steps (warm-up); NaN if there are none."""
        series = self.metrics.get(key)
        if series is None or not len(self.step):
            return math.nan
        late = series.values[series.steps > WARM_UP_SHARE * self.step[-1]]
        late = late[np.isfinite(late)]
        return float(late.mean()) if len(late) else math.nan

    def matching(self, prefix: str) -> dict[str, Series]:
        """The metrics whose key starts with ``prefix``."""
        return {key: series for key, series in self.metrics.items() if key.startswith(prefix)}


def recipe_of(header: Mapping[str, Any]) -> str:
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


def _size(parameters: float) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{name}"
    return f"{parameters:.0f}"
