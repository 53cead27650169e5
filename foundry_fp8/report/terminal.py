"""The comparison table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foundry_fp8.report.comparison import COLUMNS, Row, explain, format_row, shown_columns

__all__ = ["print_comparison"]


def print_comparison(rows: Sequence[Row], console: Console) -> None:
    """Print the rows, what the columns mean, and what is wrong with each run."""
    cells = [format_row(row) for row in rows]
    shown = shown_columns(cells)
    table = Table(caption=explain(rows, shown), caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index in shown:
        # In a narrow terminal the run's name is the last to be cut.
        table.add_column(COLUMNS[index], justify="left" if index < 3 else "right", no_wrap=index == 0)
    for line in cells:
        table.add_row(*(Text(line[index]) for index in shown))
    console.print(table)
    for row in rows:
        for problem in row.problems:
            console.print(Text.assemble((f"{row.run.name}:", "yellow"), f" {problem}"))
