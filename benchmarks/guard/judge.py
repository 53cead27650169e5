"""What a run was, and how the guard did on it: pure functions of losses and events."""

from __future__ import annotations

import math
import re
import statistics
from fnmatch import fnmatch
from typing import Any

from case import Case

WIDTH = 10
"""Steps that a loss is averaged over before it is compared."""
TAIL = 20
"""Steps at the end whose mean is the final loss."""


def smooth(losses: list[float], width: int = WIDTH) -> list[float]:
    """Mean of the last ``width`` losses at every step; NaN stays NaN."""
    return [sum(losses[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(losses))]


def final(losses: list[float]) -> float:
    return sum(losses[-TAIL:]) / TAIL


def above(losses: list[float], reference: list[float]) -> float:
    """The final loss over the reference's, minus 1."""
    return final(losses) / final(reference) - 1


def band(case: Case, fp8: list[float], high: list[float]) -> float:
    """How far FP8's smoothed loss lay above high precision's, as a share, before the onset: two runs drift apart by rounding alone."""
    pairs = list(zip(smooth(fp8), smooth(high), strict=True))[WIDTH : max(WIDTH, case.onset)]
    return max([0.0, *(ours / theirs - 1 for ours, theirs in pairs)])


def departure(case: Case, fp8: list[float], reference: list[float], share: float = 0.01) -> int | None:
    """The first step from the onset on at which the smoothed loss lies ``share`` above its band, and stays there for ``WIDTH``."""
    limit = 1 + band(case, fp8, reference) + share
    outside = [
        not ours <= theirs * limit for ours, theirs in zip(smooth(fp8), smooth(reference), strict=True)
    ]
    return next((i for i in range(case.onset, len(outside)) if all(outside[i : i + WIDTH])), None)


def label(
    case: Case, high: list[float], fp8: list[float], reference: list[float],
    diverged: float = 0.05, same: float = 0.02,
) -> dict[str, Any]:  # fmt: skip
    """What the run is without the guard, and whether that is what its label says.

    Args:
        case: Which.
        high: Losses in high precision.
        fp8: In FP8.
        reference: Of a healthy run: ``high``, or where high precision diverges too, without the mechanism.
        diverged: Above the reference at the end by more than this.
        same: Or by no more than this.
    """
    ours, theirs = above(fp8, reference), above(high, reference)
    holds = {
        "healthy": abs(ours) <= same,
        "diverges": not ours <= diverged and abs(theirs) <= same,
        "diverges in both": not ours <= diverged and not theirs <= diverged,
    }
    return {
        "fp8_above_reference": ours,
        "high_above_reference": theirs,
        "departure": departure(case, fp8, reference) if case.diverges else None,
        "holds": holds[case.label],
    }


def block_of(unit: str) -> int | None:
    """The block that a unit of the guard is, or lies in: of ``layer_003``, ``model.layers.3.mlp.down_proj``."""
    found = re.search(r"layer_(\d+)|(?:^|\.)(?:layers|blocks)\.(\d+)(?:\.|$)", unit)
    return None if found is None else int(found[1] or found[2])


def verdict(case: Case, left: int | None, losses: list[float], high: list[float], events: list[dict[str, Any]],
            in_fp8: list[float]) -> dict[str, Any]:  # fmt: skip
    """How the guard did.

    Args:
        case: Which.
        left: The step at which FP8 alone leaves its band.
        losses: With the guard.
        high: In high precision.
        events: The guard's. An event's batch is a count: what was measured at step ``batch``, before that step.
        in_fp8: By step, the share of what FP8 was asked for that ran in FP8.
    """
    onset = case.onset if case.diverges else math.inf
    alarms, demotions, promotions = (
        [event for event in events if event["action"] == action] for action in ("alarm", "demote", "return")
    )
    true = [event["batch"] for event in alarms if event["batch"] >= onset]

    def false(event: dict[str, Any]) -> bool:
        elsewhere = bool(case.blocks) and block_of(event["unit"]) not in case.blocks
        return event["batch"] < onset or elsewhere

    def affected(event: dict[str, Any]) -> bool:
        there = case.ends is None or event["batch"] < case.ends
        # A whole block has the cause in it, whatever the module.
        touched = "." not in event["unit"] or fnmatch(event["unit"], case.touched)
        return case.diverges and there and touched and not false(event)

    return {
        "label": case.label,
        "first_alarm": true[0] if true else None,
        "lead_steps": left - true[0] if true and left is not None else None,
        "false_alarms": len(alarms) - len(true),
        "steps_that_could_alarm_falsely": case.onset if case.diverges else case.steps,
        "demotions": len(demotions),
        "false_demotions": sum(map(false, demotions)),
        "promotions": len(promotions),
        "promotions_while_affected": sum(map(affected, promotions)),
        "time_in_fp8": sum(in_fp8) / len(in_fp8),
        "guarded_above_high": above(losses, high),
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """What the guard promises, counted over verdicts."""
    curable, healthy = ([row for row in rows if row["label"] == kind] for kind in ("diverges", "healthy"))
    leads = [row["lead_steps"] for row in curable if row["lead_steps"] is not None]
    in_time = sum(lead >= 0 for lead in leads)  # the guard measures before the step
    saved = sum(row["guarded_above_high"] <= 0.01 for row in curable)
    false = sum(row["false_alarms"] for row in rows)
    steps = sum(row["steps_that_could_alarm_falsely"] for row in rows)
    return (
        f"{in_time} of {len(curable)} runs that diverge in FP8 alone alarmed before the loss left its band by 1 % (median lead "
        f"{statistics.median(leads or [math.nan]):.0f} steps); {saved} end at most 1 % above high precision. {false} false alarms in {steps} "
        f"steps; {sum(row['demotions'] for row in healthy)} demotions in {len(healthy)} healthy runs; "
        f"{sum(row['promotions_while_affected'] for row in rows)} promotions while the cause was there."
    )
