"""The comparison in a sentence or two."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foundry_fp8.report.comparison import Row

__all__ = ["verdict"]

MOST = 3
"""Models with a sentence of their own."""


def verdict(rows: Sequence[Row]) -> str:
    """What FP8 did, model by model, on the most devices that a pair of runs had; where it is emulated, of the loss alone."""
    paired = [row for row in rows if row.baseline is not None]
    if not paired:
        return "Nothing to compare: no FP8 run has a run in high precision of the same model on as many devices beside it."
    models: list[list[Row]] = []
    for row in paired:
        group = next((g for g in models if g[0].run.same_model(row.run)), None)
        if group is None:
            models.append([row])
        else:
            group.append(row)
    said = [_sentence(group, named=len(models) > 1) for group in models[:MOST]]
    if len(models) > MOST:
        said.append(f"{len(models) - MOST} more models are in the table.")
    return " ".join(said)


def _sentence(rows: Sequence[Row], named: bool) -> str:
    most = max(row.run.devices for row in rows)

    # The fastest; where nothing has a speed, the one whose loss is lowest.
    def order(row: Row) -> tuple[float, float]:
        faster, higher = row.percent_faster, row.percent_loss_higher
        return (-faster if math.isfinite(faster) else math.inf, higher if math.isfinite(higher) else math.inf)

    best = min((row for row in rows if row.run.devices == most), key=order)
    assert best.baseline is not None
    parts = []
    if math.isfinite(best.percent_faster):
        speed = best.tokens_per_second_per_device / best.baseline.tokens_per_second_per_device
        parts.append(f"{speed:.2f}x {'faster' if speed >= 1 else 'as fast'}")
    if math.isfinite(best.percent_loss_higher):
        parts.append(f"{best.percent_loss_higher:+.2f} % loss".replace("-0.00", "+0.00"))
    of = f", {best.run.model}" if named else ""
    what = "GPU" if best.run.header.get("device_type") == "gpu" else "device"
    where = f" on {most} {what}{'s' if most > 1 else ''}"
    if best.run.backend == "emulated":
        outcome = parts[-1] if parts else "no loss to compare"
        return f"FP8 {best.run.recipe} (emulated{of}): {outcome}{where}. An emulated run does not show FP8's speed."
    return f"FP8 {best.run.recipe}{of}: {' at '.join(parts) or 'neither speed nor loss to compare'}{where}."
