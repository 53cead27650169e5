"""How far an alarm may be believed: precision and recall of a run's first alarm by horizon, with exact intervals."""

from __future__ import annotations

from typing import Any

HORIZONS = (20, 50, 100, 400)
"""Steps; the last is longer than any run is after its first alarm."""


def interval(hits: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share: it covers the true one in at least ``confidence`` of all samples.

    Source:
        Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial" (1934).
    """
    from scipy.stats import beta

    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(beta.ppf(tail, hits, of - hits + 1))
    high = 1.0 if hits == of else float(beta.ppf(1 - tail, hits + 1, of - hits))
    return low, high


def first_alarm(row: dict[str, Any]) -> int | None:
    """The batch of a run's first alarm; ``None`` if it had none, or if its loss had left its band before.

    Until then a guarded run is the run of FP8 alone, whose departure it is set against; later alarms follow on what the guard did.
    """
    alarms = [event["batch"] for event in row["events"] if event["action"] == "alarm"]
    if not alarms or (row["departure"] is not None and min(alarms) > row["departure"]):
        return None
    return min(alarms)


def precision(rows: list[dict[str, Any]], horizon: int) -> tuple[int, int]:
    """Of the runs with an alarm while the loss was in its band, those whose loss in FP8 alone leaves it within ``horizon`` steps.

    An alarm before the cause began foretells nothing, whatever came later.
    """
    told = [(row, alarm) for row in rows if (alarm := first_alarm(row)) is not None]
    return sum(_followed(row, alarm, horizon) for row, alarm in told), len(told)


def _followed(row: dict[str, Any], alarm: int, horizon: int) -> bool:
    left = row["departure"]
    return left is not None and alarm > row["onset"] and left + 1 - alarm <= horizon  # a batch is a count


def recall(rows: list[dict[str, Any]], horizon: int) -> tuple[int, int]:
    """Of the runs whose loss in FP8 alone leaves its band, those with an alarm since the cause began, and at most ``horizon`` steps
    before."""
    left = [row for row in rows if row["departure"] is not None]
    return sum(row["lead_steps"] is not None and 0 < row["lead_steps"] <= horizon for row in left), len(left)


def chance(rows: list[dict[str, Any]], horizon: int) -> float:
    """The precision of an alarm at random: the share of steps in the band that have the departure within ``horizon``."""
    near = sum(min(horizon, row["departure"]) for row in rows if row["departure"] is not None)
    steps = sum(len(row["losses"]) if row["departure"] is None else row["departure"] for row in rows)
    return near / max(1, steps)


def share(hits: int, of: int) -> str:
    if not of:
        return "0 of 0"
    low, high = interval(hits, of)
    return f"{hits} of {of} ({low:.0%} to {high:.0%})"


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table by horizon, and precision by the signal of the first alarm."""
    lines = [
        "| within | first alarms that were followed | departures that were foretold | an alarm at random |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {'any time' if n == HORIZONS[-1] else f'{n} steps'} | {share(*precision(rows, n))} | {share(*recall(rows, n))} "
        f"| {chance(rows, n):.0%} |"
        for n in HORIZONS
    ]
    signals: dict[str, list[bool]] = {}
    for row in rows:
        if (alarm := first_alarm(row)) is not None:
            event = next(e for e in row["events"] if e["action"] == "alarm" and e["batch"] == alarm)
            signals.setdefault(event["signal"].split(" of ")[0], []).append(
                _followed(row, alarm, HORIZONS[-1])
            )
    lines += ["", "By the first alarm's signal, at any time: " + ", ".join(
        f"{name} {sum(hits)} of {len(hits)}" for name, hits in sorted(signals.items())
    ) + "."]  # fmt: skip
    return "\n".join(lines)
