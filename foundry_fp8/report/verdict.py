"""The comparison in a sentence: what FP8 did to the loss, then to the speed, model by model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from foundry_fp8.report.comparison import Row
from foundry_fp8.report.judgement import Judgement
from foundry_fp8.report.run import HIGH_PRECISION

__all__ = ["Verdict", "verdict", "verdicts"]

_BEST_FIRST = ("fine", "above", "diverged", "unknown")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one model."""

    model: str
    text: str
    outcome: str = "unknown"
    """``fine``, ``above`` (the loss), ``diverged``, or ``unknown``."""
    run: str | None = None
    """The run that the sentence begins with: the best one."""
    percent_loss_higher: float = math.nan

    def passes(self, most_percent: float) -> bool:
        """Whether the loss is known to be at most this much above high precision's."""
        return self.outcome in ("fine", "above") and self.percent_loss_higher <= most_percent

    def as_json(self) -> dict[str, Any]:
        """Its fields, ``None`` for NaN."""
        known = math.isfinite(self.percent_loss_higher)
        return dataclasses.asdict(self) | ({} if known else {"percent_loss_higher": None})


def verdict(rows: Sequence[Row]) -> str:
    """The sentences, one a line."""
    return "\n".join(found.text for found in verdicts(rows))


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """One for each model that has an FP8 run: of its best run, with those that are not fine named behind it.

    The best is one whose loss is fine, on the most devices, as long as its baseline, then the fastest.
    """
    baselines = {id(row.baseline) for row in rows}
    models: list[list[Row]] = []
    for row in rows:
        if row.baseline is None and (row.run.recipe == HIGH_PRECISION or id(row.run) in baselines):
            continue
        group = next((g for g in models if g[0].run.same_model(row.run)), None)
        if group is None:
            models.append([row])
        else:
            group.append(row)
    if not models:
        return [Verdict(model="", text="FP8: cannot say, because none of the runs is in FP8.")]
    return [_verdict(group, f"{group[0].run.model}: " if len(models) > 1 else "") for group in models]


def _verdict(rows: Sequence[Row], prefix: str) -> Verdict:
    paired = [(row, row.judgement) for row in rows if row.judgement is not None]
    if not paired:
        why = "no FP8 run has a run in high precision of the same model on as many devices beside it"
        return Verdict(model=rows[0].run.model, text=f"{prefix}FP8: cannot say, because {why}.")
    paired.sort(key=lambda pair: _order(*pair))
    (best, judged), *others = paired
    alone = sum(row.run.recipe == best.run.recipe for row, _ in paired) == 1
    said = [_sentence(best, judged, best.run.recipe if alone else best.run.name)]
    said += [
        f"{row.run.name} diverged at step {it.step}"
        if it.outcome == "diverged"
        else f"{row.run.name}: {it.percent:+.2f} %"
        for row, it in others
        if it.outcome in ("above", "diverged")
    ]
    return Verdict(
        model=best.run.model,
        text=f"{prefix}{'; '.join(said)}.",
        outcome=judged.outcome,
        run=best.run.name,
        percent_loss_higher=judged.percent,
    )


def _order(row: Row, judged: Judgement) -> tuple[float, ...]:
    slower, higher = (x if math.isfinite(x) else math.inf for x in (-row.percent_faster, judged.percent))
    short = judged.compared < judged.of
    return _BEST_FIRST.index(judged.outcome), -row.run.devices, short, slower, higher


def _sentence(row: Row, judged: Judgement, called: str) -> str:
    run, baseline = row.run, row.baseline
    assert baseline is not None
    subject = "FP8" if run.recipe != HIGH_PRECISION else run.name
    if judged.outcome == "unknown":
        return f"{subject}: cannot say, because {judged.why}"
    if judged.outcome == "diverged":
        return f"{subject} diverged at step {judged.step}: {run.name}"
    word, place = ("worse", "above") if judged.outcome == "above" else ("fine", "within")
    if judged.percent < -judged.band:
        place = "below"
    percent = f"{judged.percent:+.2f}".replace("-0.00", "+0.00")
    steps = f"over {judged.compared} of {judged.of} steps"
    loss = f"loss {place} the noise of this run ({percent} %, band {judged.band:.2g} %, {steps})"
    speed = ""
    if math.isfinite(row.percent_faster):
        speed = f"{row.tokens_per_second_per_device / baseline.tokens_per_second_per_device:.2f} x as fast, "
    elif "emulated" in (run.backend, baseline.backend):
        speed = "emulated, which does not show FP8's speed, "
    unit = "GPU" if run.header.get("device_type") == "gpu" else "device"
    return f"{subject} is {word}: {loss}, {speed}with {called} on {run.devices} {unit}{'s' if run.devices > 1 else ''}"
