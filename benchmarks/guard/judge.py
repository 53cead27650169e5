"""What a run was, and how the guard did on it: pure functions of losses and events."""

from __future__ import annotations

import math
import re
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
    """How far FP8's smoothed loss lay above high precision's, as a share, while nothing had happened yet.

    Two runs that differ by rounding drift apart a little: that is no sickness.
    """
    pairs = list(zip(smooth(fp8), smooth(high), strict=True))[WIDTH : max(WIDTH, case.onset)]
    return max([0.0, *(ours / theirs - 1 for ours, theirs in pairs)])


def departure(case: Case, fp8: list[float], reference: list[float], share: float = 0.01) -> int | None:
    """The first step at or after the onset from which the smoothed loss lies ``share`` above its band, and stays for ``WIDTH``.

    Args:
        case: Whose onset counts.
        fp8: Losses of the run.
        reference: Losses of the same run without sickness: high precision; where that is sick too, high precision without
            the mechanism.
        share: Of the reference.
    """
    limit = 1 + band(case, fp8, reference) + share
    outside = [
        not ours <= theirs * limit for ours, theirs in zip(smooth(fp8), smooth(reference), strict=True)
    ]
    for step in range(case.onset, len(outside)):
        if all(outside[step : step + WIDTH]):
            return step
    return None


def label(
    case: Case,
    high: list[float],
    fp8: list[float],
    reference: list[float],
    diverged: float = 0.05,
    same: float = 0.02,
) -> dict[str, Any]:
    """What the run is without the guard, and whether that is what its label says.

    Args:
        case: Which.
        high: Losses in high precision.
        fp8: In FP8.
        reference: Of a run that is not sick: ``high``, or where high precision diverges too, without the mechanism.
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
        "final_high": final(high),
        "fp8_above_reference": ours,
        "high_above_reference": theirs,
        "departure": departure(case, fp8, reference) if case.diverges else None,
        "holds": holds[case.label],
    }


def block_of(unit: str) -> int | None:
    """The block that a unit of the guard is, or lies in: of ``layer_003``, ``model.layers.3.mlp.down_proj``."""
    found = re.search(r"layer_(\d+)|(?:^|\.)layers\.(\d+)(?:\.|$)", unit)
    return None if found is None else int(found[1] or found[2])


def verdict(case: Case, left: int | None, losses: list[float], high: list[float], events: list[dict[str, Any]],
            in_fp8: list[float]) -> dict[str, Any]:  # fmt: skip
    """One row of the table.

    Args:
        case: Which.
        left: The step at which FP8 alone leaves its band.
        losses: With the guard.
        high: In high precision.
        events: The guard's.
        in_fp8: By step, the share of what FP8 was asked for that ran in FP8.
    """
    alarms = [e for e in events if e["action"] == "alarm"]
    demotions = [e for e in events if e["action"] == "demote"]
    promotions = [e for e in events if e["action"] == "promote"]
    onset = case.onset if case.diverges else math.inf
    true = [
        e for e in alarms if e["batch"] >= onset
    ]  # an event's batch is a count: it has seen step batch - 1
    lead = left - true[0]["batch"] if true and left is not None else None

    def innocent(event: dict[str, Any]) -> bool:
        if event["batch"] < onset:
            return True
        return bool(case.sick) and block_of(event["unit"]) not in case.sick

    def sick(event: dict[str, Any]) -> bool:
        there = case.ends is None or event["batch"] < case.ends
        # A whole block has the cause in it, whatever the module.
        touched = "." not in event["unit"] or fnmatch(event["unit"], case.touched)
        return case.diverges and there and touched and not innocent(event)

    return {
        "first_alarm": true[0]["batch"] if true else None,
        "first_signal": true[0]["signal"] if true else None,
        "lead_steps": lead,
        "alarms": len(alarms),
        "false_alarms": sum(e["batch"] < onset for e in alarms),
        "steps_that_could_alarm_falsely": case.onset if case.diverges else case.steps,
        "demotions": len(demotions),
        "false_demotions": sum(map(innocent, demotions)),
        "promotions": len(promotions),
        "promotions_while_sick": sum(map(sick, promotions)),
        "renewals": sum(e["action"] == "renew" for e in events),
        "time_in_fp8": sum(in_fp8) / len(in_fp8),
        "guarded_above_high": above(losses, high),
    }
