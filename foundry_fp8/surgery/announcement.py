"""What a run says of its conversion before it starts: one line, and what a user would not expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foundry_fp8.surgery.left_out import ADAPTER, HEAD, ROUTER, TIED
from foundry_fp8.surgery.report import SurgeryReport, merged_name, merged_rows

__all__ = ["announcement", "notices"]

EXPECTED = (HEAD, ROUTER, ADAPTER, TIED)
"""Why a weight stays in high precision, where that needs no explanation."""
FEW = 0.5
"""Share of the multiplied weights below which FP8 can hardly win."""


def announcement(
    report: SurgeryReport, *, around: str, log: str | None = None, notes: Sequence[str] = ()
) -> str:
    """The block, for a terminal.

    Args:
        report: Of the conversion.
        around: What is not converted runs in: ``bf16``, ``fp16`` or ``fp32``.
        log: The run log's path.
        notes: :func:`notices` and other sentences, one line each.
    """
    weights = [row for row in report.rows if row.action != "unused"]
    words = [
        f"FP8: {len(report.converted)} of {len(weights)} linears ({100 * report.converted_share:.1f} % of GEMM weights)"
        f", {report.recipe_names}, {report.backend}"
    ]
    stay = [row for row in report.rows if row.action == "skipped"]
    usual = merged_rows([row for row in stay if row.reason in EXPECTED])
    if usual:
        names = [row["name"] for row in usual]
        shown = ", ".join(_short(name) for name in names[:3]) + (
            f" and {len(names) - 3} more" * (len(names) > 3)
        )
        words.append(f"{shown} {'stays' if sum(row['count'] for row in usual) == 1 else 'stay'} {around}")
    if report.attention:
        inside = sum(row.action == "converted" for row in report.attention)
        words.append(f"attention's GEMMs in {inside} of {len(report.attention)}")
    if log is not None:
        words.append(f"log: {log}")
    reasons: dict[str, list[str]] = {}
    for row in stay:
        if row.reason not in EXPECTED:
            reasons.setdefault(row.reason, []).append(row.name)
    lines = [
        f"{len(names)} {'stays' if len(names) == 1 else 'stay'} {around} ({_short(merged_name(names))}): {reason}"
        for reason, names in reasons.items()
    ]
    return "\n".join(["; ".join(words), *(f"  {line}" for line in [*lines, *notes])])


def notices(
    report: SurgeryReport, *, precision: str, device: str, callbacks: Mapping[str, Any] | Sequence[str]
) -> list[str]:
    """What a user of this configuration would not expect, in sentences.

    Args:
        report: Of the conversion.
        precision: Composer's: ``amp_bf16``, ``fp32``, ...
        device: ``cpu``, ``cuda``, ...
        callbacks: Class names of the run's callbacks.
    """
    found = []
    if report.backend == "emulated":
        found.append(
            "Warning: emulated. The losses are FP8's, the speed is not: slower than high precision, and no MFU."
        )
    if report.converted_share < FEW:
        found.append(
            f"Warning: only {report.converted_share:.0%} of what is multiplied runs in FP8; quantising may cost more than it wins."
        )
    if device == "cuda" and precision == "fp32":
        found.append("Warning: precision: fp32, so what stays out of FP8 runs in float32. amp_bf16 is usual.")
    if any(r.uses_history for r in report.recipes) and "DivergenceGuard" not in callbacks:
        found.append(
            "Warning: delayed scaling and no callbacks.divergence_guard: nothing acts when outliers outgrow the history."
        )
    if device == "cuda" and "SpeedMonitor" in callbacks:
        found.append(
            "Note: speed_monitor's throughput/device/mfu divides by one precision's peak; mfu_monitor's mfu/mfu by each GEMM's own."
        )
    return found


def _short(name: str) -> str:
    """Without what wraps the whole model: ``model.model.lm_head`` is ``lm_head``."""
    return name.split(".")[-1] if "{" not in name and name.endswith("lm_head") else name
