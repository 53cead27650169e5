"""The comparison table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from foundry_fp8.report.comparison import COLUMNS, DEFINITIONS, Row, format_row

__all__ = ["print_comparison"]


def print_comparison(rows: Sequence[Row], console: Console) -> None:
    """Print the rows, what the columns mean, and what is wrong with each run."""
    table = Table(caption=DEFINITIONS, caption_justify="left", show_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("Run", "Precision") else "right")
    for row in rows:
        table.add_row(*format_row(row))
    console.print(table)
    for row in rows:
        for problem in row.run.problems:
            console.print(f"[yellow]{row.run.name}:[/] {problem}", highlight=False)
