"""The comparison of runs in numbers: the columns of the tables in AWS's FP8 measurements.

Source: https://aws.amazon.com/blogs/machine-learning/how-fp8-boosts-llm-training-by-18-on-amazon-sagemaker-p5-instances/
(tokens/s/GPU, % decrease against the smallest node count, loss, % faster, % loss higher). In its first table that page
divides differences in speed by the speed without FP8, and takes the decrease of both precisions from the run without FP8 on
one node: ``percent_of="baseline"``. In its second it divides by the speed with FP8, and takes each decrease from its own
precision: ``percent_of="own"``. Only runs of one model are held against each other.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from foundry_fp8.report.judgement import Judgement, judge, kurtosis_lead
from foundry_fp8.report.run import HIGH_PRECISION, Run

__all__ = [
    "COLUMNS", "UNKNOWN", "Row", "baseline_of", "compare", "config_differences", "explain", "format_row", "shown_cells",
]  # fmt: skip

UNKNOWN = "–"

_DEFINITIONS = {
    **dict.fromkeys(("Run", "Model", "Precision", "Nodes x devices")),
    "Tokens/s per device": "after the first 10 % of the steps (warm-up), evaluation and saving excluded",
    "% decrease": "of that, against the high-precision run of the same model on the fewest devices",
    "% faster": "against the high-precision run of the same model on as many devices; not where FP8 is emulated",
    "Final loss": "mean training loss over the last 10 % of the steps",
    "% loss higher": "the same against the high-precision run, over the steps that both have",
    "Kurtosis leads": "batches from where a layer's is over twice the highest of high precision, and stays so, to where the loss diverged",
    "Held-out loss": "the last evaluation",
    "Task score": "mean accuracy in % over the downstream tasks that all evaluated runs have",
}
COLUMNS = tuple(_DEFINITIONS)
_EMULATED = "Emulated: FP8's numbers, computed on hardware without FP8; its loss is that of FP8 training, its speed is not."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One run among others. NaN: not known."""

    run: Run
    baseline: Run | None
    """The high-precision run it is held against; ``None`` if there is none, or it is one."""
    tokens_per_second_per_device: float
    percent_decrease: float
    percent_faster: float
    final_loss: float
    judgement: Judgement | None
    """Of its loss against the baseline's; ``None`` without one."""
    held_out_loss: float
    scores: Mapping[str, float]
    """The last accuracy of each downstream task, a share of one; empty if there was no such evaluation."""
    task_score: float
    """Its mean in % over the tasks that every run with any has."""
    tflops_per_device: float
    mfu: float
    """A share of one, as the former a mean after warm-up."""

    @property
    def percent_loss_higher(self) -> float:
        """Over the last 10 % of the steps that both have."""
        return math.nan if self.judgement is None else self.judgement.percent

    @property
    def kurtosis_leads(self) -> float:
        """Over the loss of a run that diverged, in batches; see :func:`~foundry_fp8.report.judgement.kurtosis_lead`."""
        at = None if self.judgement is None else self.judgement.step
        return math.nan if at is None or self.baseline is None else kurtosis_lead(self.run, self.baseline, at)

    @property
    def problems(self) -> list[str]:
        """What is missing in the run or wrong with it, in sentences."""
        found, judged = list(self.run.problems), self.judgement
        if judged is None or self.baseline is None:
            return found
        if judged.outcome == "diverged":
            found.append(f"It diverged at step {judged.step}.")
        elif judged.outcome == "unknown":
            found.append(f"Nothing can be said of its loss, because {judged.why}.")
        if judged.compared < judged.of:
            found.append(
                f"It is compared over {judged.compared} of the {judged.of} steps of {self.baseline.name}."
            )
        return found


def baseline_of(run: Run, runs: Sequence[Run], named: str | None = None) -> Run | None:
    """The first baseline of the same model on as many devices, ``None`` for a baseline itself.

    ``named`` is a glob on the names of the baselines; by default the runs in high precision are.
    """
    if _is_baseline(run, named):
        return None
    for other in runs:
        alike = (other.nodes, other.devices) == (run.nodes, run.devices) and other.same_model(run)
        if _is_baseline(other, named) and alike:
            return other
    return None


def _is_baseline(run: Run, named: str | None) -> bool:
    return run.recipe == HIGH_PRECISION if named is None else fnmatch.fnmatchcase(run.name, named)


def shown_cells(rows: Sequence[Row]) -> tuple[list[int], list[list[str]]]:
    """The columns that say something (not what no run fills, nor one and the same layout); of each row the cells in them."""
    cells = [format_row(row) for row in rows]
    distinguishing = [COLUMNS.index("Model"), COLUMNS.index("Nodes x devices")]
    alike = [i for i in distinguishing if len({row[i] for row in cells}) == 1]
    shown = [i for i in range(len(COLUMNS)) if any(row[i] != UNKNOWN for row in cells) and i not in alike]
    return shown, [[row[i] for i in shown] for row in cells]


def explain(rows: Sequence[Row], columns: Sequence[int]) -> str:
    """What the columns shown mean, and what to know about the runs, as sentences."""
    said = [f"{COLUMNS[i]}: {_DEFINITIONS[COLUMNS[i]]}." for i in columns if _DEFINITIONS[COLUMNS[i]]]
    if any(row.run.backend == "emulated" for row in rows):
        said.append(_EMULATED)
    return " ".join(said)


def compare(runs: Sequence[Run], *, baseline: str | None = None, percent_of: str = "baseline") -> list[Row]:
    """One row a run: model by model from small to large, by devices, baselines first, otherwise as given.

    Args:
        runs: Of any models.
        baseline: A glob on the names of the runs that others are held against; by default those in high precision.
        percent_of: ``baseline`` or ``own``, what percentages of speed are of: see the module.

    Raises:
        ValueError: No run has such a name.
    """
    if baseline is not None and not any(_is_baseline(run, baseline) for run in runs):
        raise ValueError(
            f"--baseline {baseline}: no run is called so. They are: {', '.join(r.name for r in runs)}."
        )
    models: list[Run] = []
    for run in runs:
        if not any(run.same_model(first) for first in models):
            models.append(run)
    models.sort(key=lambda run: run.header.get("parameters") or 0)

    def place(run: Run) -> tuple[int, int, int, bool]:
        model = next(i for i, first in enumerate(models) if run.same_model(first))
        return model, run.nodes, run.devices, not _is_baseline(run, baseline)

    ordered = sorted(runs, key=place)  # sorted() is stable
    return [_row(run, ordered, baseline, percent_of) for run in ordered]


def _row(run: Run, runs: Sequence[Run], named: str | None, percent_of: str) -> Row:
    speed = run.tokens_per_second_per_device
    own = percent_of == "own"
    # In order of devices, baselines first.
    smallest = next(r for r in runs if r.same_model(run) and (not own or r.recipe == run.recipe))
    baseline = baseline_of(run, runs, named)
    scores = {task: float(series.values[-1]) for task, series in run.scores.items()}
    shared = [t for t in scores if all(t in other.scores for other in runs if other.scores)]
    faster = decrease = math.nan
    if smallest.devices != run.devices:
        decrease = 100 * (1 - speed / smallest.tokens_per_second_per_device)
    if baseline is not None and "emulated" not in (run.backend, baseline.backend):
        of, to = baseline.tokens_per_second_per_device, speed
        faster = 100 * (1 - of / to) if own else 100 * (to / of - 1)
    return Row(
        run=run,
        baseline=baseline,
        tokens_per_second_per_device=speed,
        percent_decrease=decrease,
        percent_faster=faster,
        final_loss=run.final_loss,
        judgement=None if baseline is None else judge(run, baseline),
        held_out_loss=run.eval_loss(),
        scores=scores,
        task_score=100 * float(np.mean([scores[task] for task in shared])) if shared else math.nan,
        tflops_per_device=run.settled("mfu/tflops_per_device"),
        mfu=run.settled("mfu/mfu"),
    )


def format_row(row: Row) -> tuple[str, ...]:
    """The cells of a row under :data:`COLUMNS`, as text; an en dash where a value is not known."""
    run = row.run
    diverged = row.judgement is not None and row.judgement.outcome == "diverged"
    around = str(run.header.get("precision", "precision not logged"))
    precision = around if run.backend is None else f"{run.recipe}, {run.backend}"
    return (
        run.name,
        run.model,
        precision,
        f"{run.nodes} x {max(1, run.devices // run.nodes)}",
        _text(row.tokens_per_second_per_device, ",.0f"),
        _text(row.percent_decrease, "+.1f"),
        _text(row.percent_faster, "+.1f"),
        "nan" if run.has_loss.any() and math.isnan(row.final_loss) else _text(row.final_loss, ".4f"),
        "diverged" if diverged else _text(row.percent_loss_higher, "+.2f"),
        _text(row.kurtosis_leads, "+.0f"),
        _text(row.held_out_loss, ".4f"),
        _text(row.task_score, ".1f"),
    )


def _text(value: float, form: str) -> str:
    if math.isnan(value):
        return UNKNOWN
    text = format(value, form)
    return text.replace("-", "+") if not float(text.replace(",", "")) else text  # no -0.00


def config_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The configuration keys, dotted, whose values differ between the runs, with each run's value as text."""
    conversion = ("fp8", "fp8_as_run")  # has a section of its own
    kept = ({k: v for k, v in run.hyperparameters.items() if k not in conversion} for run in runs)
    flat = [dict(_flatten(values)) for values in kept]
    # The order of the first run that has a key is the YAML's own.
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = [(key, [UNKNOWN if key not in values else str(values[key]) for values in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            found += _flatten(value, f"{name}.")
        else:
            found.append((name, value))
    return found
