"""From logs to a table in the terminal, PNG figures and one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from foundry_fp8.report.comparison import compare
from foundry_fp8.report.runs import read_runs
from foundry_fp8.report.terminal import print_comparison

__all__ = ["report_runs"]


def report_runs(paths: Sequence[Path], output: Path, *, console: Console, title: str) -> Path:
    """Read the runs, print the table, write the figures and the page.

    Args:
        paths: Logs, or folders that hold one each; the order is the order of the figures.
        output: Folder for ``report.html`` and ``*.png``; made if missing, files of these names are replaced.
        console: Where the table goes.
        title: Heading of the page.

    Returns:
        The path of ``report.html``.

    Raises:
        FileNotFoundError: No log under one of the paths.
        ValueError: A file that is no log.
    """
    rows = compare(read_runs(paths))
    print_comparison(rows, console)
    return output
