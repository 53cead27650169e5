"""From logs to a table in the terminal, PNG figures and one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from foundry_fp8.report.comparison import compare
from foundry_fp8.report.figures import FIGURES
from foundry_fp8.report.page import render_page
from foundry_fp8.report.runs import read_runs
from foundry_fp8.report.style import styled
from foundry_fp8.report.terminal import print_comparison

__all__ = ["report_runs"]

_PNG_DPI = 160


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
    output.mkdir(parents=True, exist_ok=True)
    page = output / "report.html"
    with styled():
        figures = {spec.name: figure for spec in FIGURES if (figure := spec.draw(rows)) is not None}
        for name, figure in figures.items():
            figure.savefig(output / f"{name}.png", dpi=_PNG_DPI)
        page.write_text(render_page(rows, figures, title), encoding="utf-8")
    console.print(f"Report: {page}, figures: {output}/*.png", soft_wrap=True, highlight=False)
    return page
