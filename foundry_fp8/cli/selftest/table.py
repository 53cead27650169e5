"""The verdicts as a table in the terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from foundry_fp8.cli.selftest.claims import Verdict

__all__ = ["table"]

_COLOURS = {"confirmed": "green", "refuted": "red", "not reached": "yellow"}


def table(verdicts: list[Verdict]) -> Table:
    """The verdicts, for a terminal."""
    shown = Table("verdict", "claim", "figures", title="What the documents claim", title_justify="left")
    for v in verdicts:
        shown.add_row(
            f"[{_COLOURS[v.word]}]{v.word}[/]",
            escape(v.claim.quote),
            escape(
                v.figures + (f"\n{v.claim.next}\n{v.claim.avoid}".rstrip() if v.word == "refuted" else "")
            ),
        )
    return shown
