"""From logs to a table in the terminal, the same table as CSV, Markdown and JSON, PNG figures and one HTML page."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from foundry_fp8.report.comparison import (
    COLUMNS,
    PercentOf,
    Row,
    compare,
    explain,
    format_row,
    shown_columns,
)
from foundry_fp8.report.figures import FIGURES
from foundry_fp8.report.page import render_page
from foundry_fp8.report.runs import read_runs
from foundry_fp8.report.style import as_svg, styled
from foundry_fp8.report.terminal import print_comparison
from foundry_fp8.report.verdict import verdict

__all__ = ["report_runs"]

_PNG_DPI = 240


def report_runs(
    paths: Sequence[Path],
    output: Path,
    *,
    console: Console,
    title: str,
    baseline: str | None = None,
    percent_of: PercentOf = "baseline",
) -> Path:
    """Read the runs, print the table, write the figures and the page.

    Args:
        paths: What :func:`foundry_fp8.report.runs.read_runs` reads; the order is the order of the figures.
        output: Folder for ``report.html``, ``comparison.{csv,md,json}`` and ``*.png``; made if missing, files of these names
            are replaced.
        console: Where the table goes.
        title: Heading of the page.
        baseline: See :func:`foundry_fp8.report.comparison.compare`.
        percent_of: The same.

    Returns:
        The path of ``report.html``.

    Raises:
        FileNotFoundError: No run under one of the paths.
        ValueError: A file that is no run, or a baseline that is none of them.
        ImportError: What a tracker's files need is not installed.
    """
    rows = compare(read_runs(paths), baseline=baseline, percent_of=percent_of)
    console.print(verdict(rows), style="bold", highlight=False, markup=False)
    print_comparison(rows, console)
    output.mkdir(parents=True, exist_ok=True)
    page = output / "report.html"
    for name, text in (("csv", _csv(rows)), ("md", _markdown(rows)), ("json", _json(rows))):
        (output / f"comparison.{name}").write_text(text, encoding="utf-8")
    charts = {}
    with styled():
        for spec in FIGURES:
            figure = spec.draw(rows)
            if figure is None:
                (output / f"{spec.name}.png").unlink(missing_ok=True)  # of an earlier comparison
            else:
                figure.savefig(output / f"{spec.name}.png", dpi=_PNG_DPI)
                charts[spec.name] = as_svg(figure, spec.name)
    page.write_text(render_page(rows, title, charts), encoding="utf-8")
    console.print(
        f"Report: {page}, table: {output}/comparison.{{csv,md,json}}, figures: {output}/*.png",
        soft_wrap=True,
        highlight=False,
    )
    return page


def _values(row: Row) -> dict[str, Any]:
    """The row unrounded, ``None`` for what is not known."""
    run = row.run
    figures = {
        "tokens_per_second_per_device": row.tokens_per_second_per_device,
        "percent_decrease": row.percent_decrease,
        "percent_faster": row.percent_faster,
        "final_loss": row.final_loss,
        "percent_loss_higher": row.percent_loss_higher,
        "held_out_loss": row.held_out_loss,
        "task_score": row.task_score,
        "tflops_per_device": row.tflops_per_device,
        "mfu": row.mfu,
    }
    return {
        "run": run.name,
        "model": run.model,
        "parameters": run.header.get("parameters"),
        "precision": run.recipe,
        "around": run.header.get("precision"),
        "backend": run.backend,
        "nodes": run.nodes,
        "devices": run.devices,
        "baseline": None if row.baseline is None else row.baseline.name,
        **{key: value if math.isfinite(value) else None for key, value in figures.items()},
        "status": run.status,
        "log": str(run.path),
    }


def _csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    lines = [_values(row) for row in rows]
    writer = csv.DictWriter(out, list(lines[0]) if lines else [])
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _json(rows: Sequence[Row]) -> str:
    found = [{**_values(row), "tasks": row.scores, "problems": row.run.problems} for row in rows]
    return json.dumps({"verdict": verdict(rows), "runs": found}, indent=2) + "\n"


def _markdown(rows: Sequence[Row]) -> str:
    cells = [format_row(row) for row in rows]
    shown = shown_columns(cells)
    lines = [[COLUMNS[i] for i in shown], ["---" if i < 3 else "---:" for i in shown]]
    lines += [[line[i].replace("|", "\\|") for i in shown] for line in cells]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{verdict(rows)}\n\n{table}\n\n{explain(rows, shown)}\n"
