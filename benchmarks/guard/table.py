"""The table, the summary and the time lines of stored results."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import judge
import reliability
from common import RESULTS

SHOWN_FROM = 40
"""Steps before it are the descent that all runs share."""
IMAGES = Path(__file__).parents[2] / "docs" / "images"
COLUMNS = (
    "case", "label", "FP8 alone", "leaves at", "first alarm (signal)", "lead", "with the guard", "by chance", "in FP8", "false alarms",
    "demoted (false)", "promoted (while sick)", "renewed",
)  # fmt: skip


def percent(value: Any) -> str:
    value = float(value)
    return f"{value:+.1%}" if abs(value) < 100 else "diverged"


def cells(row: dict[str, Any]) -> list[str]:
    alarm = "none" if row["first_alarm"] is None else f"{row['first_alarm']} ({row['first_signal']})"
    if not row["label"].startswith("diverges"):
        alarm = ""
    return [
        row["name"], row["label"], percent(row["fp8_above_reference"]), str(row["departure"] or ""), alarm,
        "" if row["lead_steps"] is None else str(row["lead_steps"]), percent(row["guarded_above_high"]),
        "" if row["floor"] is None else f"{row['floor']:.1%}", f"{row['time_in_fp8']:.0%}", str(row["false_alarms"]), f"{row['demotions']} ({row['false_demotions']})",
        f"{row['promotions']} ({row['promotions_while_sick']})", str(row["renewals"]),
    ]  # fmt: skip


def line(row: dict[str, Any]) -> str:
    return f"{row['split']:9s}" + "  ".join(
        f"{name}: {cell}" for name, cell in zip(COLUMNS, cells(row), strict=True)
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """The promises of the guard, counted over some rows."""
    sick = [row for row in rows if row["label"].startswith("diverges")]
    curable = [row for row in sick if row["label"] == "diverges"]
    healthy = [row for row in rows if row["label"] == "healthy"]
    leads = sorted(row["lead_steps"] for row in sick if row["lead_steps"] is not None)
    steps = sum(row["steps_that_could_alarm_falsely"] for row in rows)
    false = sum(row["false_alarms"] for row in rows)
    in_time = sum(lead > 0 for lead in leads)
    ends = [(float(row["guarded_above_high"]), row["floor"] or 0.0) for row in curable]
    saved = sum(abs(end) <= 0.01 for end, _ in ends)
    above = sum(end <= 0.01 for end, _ in ends)
    apart = sum(abs(end) <= max(0.01, floor) for end, floor in ends)
    return (
        f"{in_time} of {len(sick)} that diverge alarmed before the loss left its band by 1 %"
        + (f" (median lead {leads[len(leads) // 2]} steps)" if leads else "")
        + f"; {saved} of {len(curable)} that diverge in FP8 alone end within 1 % of high precision ({above} at most 1 % above it; "
        f"{apart} within 1 % or what chance does); {false} false alarms in "
        f"{steps} steps ({1000 * false / max(1, steps):.1f} per 1000); {sum(row['false_demotions'] for row in healthy)} demotions in "
        f"{len(healthy)} healthy runs; {sum(row['promotions_while_sick'] for row in rows)} promotions while the cause was there."
    )


def markdown(rows: list[dict[str, Any]]) -> str:
    parts = []
    for split in dict.fromkeys(row["split"] for row in rows):
        mine = [row for row in rows if row["split"] == split]
        parts.append(f"**{split}**: {summary(mine)}\n")
        parts.append("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
        parts += ["| " + " | ".join(cells(row)) + " |" for row in mine]
        parts += ["", reliability.markdown(mine), ""]
    return "\n".join(parts)


def plot(name: str, rows: list[dict[str, Any]], labels: dict[str, Any]) -> None:
    """Loss of each run in high precision, in FP8 alone and with the guard; alarms, demotions and promotions below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 4
    height = -(-len(rows) // columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(4 * columns, 2.3 * height), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(rows) :]:
        axis.axis("off")
    marks = (
        ("alarm", "|", "tab:red"),
        ("demote", "v", "tab:purple"),
        ("promote", "^", "tab:green"),
        ("renew", "d", "tab:cyan"),
    )
    for axis, row in zip(axes.flat, rows, strict=False):
        told = labels[row["name"]]
        runs = (("high precision", told["losses"]["high"], "black"), ("FP8 alone", told["losses"]["fp8"], "tab:orange"),
                ("FP8 with the guard", row["losses"], "tab:blue"))  # fmt: skip
        for title, losses, colour in runs:
            axis.plot(judge.smooth([float(x) for x in losses]), color=colour, lw=1, label=title)
        shown = judge.smooth([float(x) for x in told["losses"]["reference"]])[SHOWN_FROM:]
        low, high = min(shown), min(shown) + 1.7 * (max(shown) - min(shown))
        axis.set_ylim(low - 0.25 * (high - low), high)
        axis.set_xlim(SHOWN_FROM, len(row["losses"]))
        for depth, (action, mark, colour) in enumerate(marks):
            steps = [event["batch"] for event in row["events"] if event["action"] == action]
            axis.plot(
                steps,
                [low - (0.05 + 0.05 * depth) * (high - low)] * len(steps),
                mark,
                color=colour,
                ms=5,
                label=action,
            )
        if row["label"] != "healthy":
            axis.axvline(row["onset"], color="grey", lw=0.6, ls=":")
        if row["departure"] is not None:
            axis.axvline(row["departure"], color="tab:red", lw=0.6, ls="--")
        axis.set_title(f"{row['name']} ({row['label']})", fontsize=7)
        axis.tick_params(labelsize=6)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=7, fontsize=8)
    figure.supxlabel("step; dotted: the cause begins, dashed: FP8 alone leaves its band by 1 %", fontsize=8)
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / f"{name}.png", dpi=90)
    plt.close(figure)


def publish(name: str, result: dict[str, Any], rows: list[dict[str, Any]], labels: dict[str, Any]) -> None:
    """Write ``results/NAME.md``, and the held-out half's ``docs/images/NAME.png``."""
    text = "".join(f"{split}: {json.dumps(made)}\n\n" for split, made in result["made"].items())
    for split in result["made"]:
        names = [row["name"] for row in rows if row["split"] == split]
        codes = Counter(result["runs"][name]["code"] for name in names)
        text += f"{split}: {', '.join(f'{count} runs by code {code}' for code, count in codes.items())}\n\n"
    (RESULTS / f"{name}.md").write_text(text + markdown(rows))
    plot(name, [row for row in rows if row["split"] == "held-out"] or rows, labels)
