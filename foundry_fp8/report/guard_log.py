"""What the divergence guard found and did, from its table in the log."""

from __future__ import annotations

import contextlib

from foundry_fp8.report.run import Run

__all__ = ["GUARD_EVENTS", "guard_events", "guard_timeline"]

GUARD_EVENTS = "guard_events"
"""The table that the divergence guard logs: batch, unit, action, signal, detail."""


def guard_events(run: Run) -> list[tuple[int, str, str, str, str]]:
    """What the divergence guard found and did, in order: the columns of its table."""
    rows = next((table.rows for table in run.tables if table.name == GUARD_EVENTS), [])
    found = []
    for row in rows:
        with contextlib.suppress(ValueError, TypeError, OverflowError):  # a row of something else
            batch, unit, action, signal, detail = row
            found.append((int(batch), str(unit), str(action), str(signal), str(detail)))
    return found


def guard_timeline(run: Run) -> list[tuple[int, str, str]]:
    """The same to be read: ``(step, layer or block, what)``."""
    return [
        (batch, unit, f"{action} {signal}".strip() + (f": {detail}" if detail else ""))
        for batch, unit, action, signal, detail in guard_events(run)
    ]
