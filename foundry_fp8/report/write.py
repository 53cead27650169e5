"""From logs to a table in the terminal, the same table as CSV, Markdown and JSON, PNG figures and one HTML page."""

from __future__ import annotations

import contextlib
import csv
import html
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foundry_fp8.config.files import refuse_files, write_file
from foundry_fp8.report.comparison import COLUMNS, Row, explain, shown_cells
from foundry_fp8.report.figures import FIGURES
from foundry_fp8.report.page import render_page
from foundry_fp8.report.sources.lines import plain_text
from foundry_fp8.report.style import as_svg, styled
from foundry_fp8.report.verdict import verdict, verdicts

__all__ = ["write_report"]

_PNG_DPI = 240
_NUMBERS = (
    "tokens_per_second_per_device", "percent_decrease", "percent_faster", "final_loss", "percent_loss_higher", "kurtosis_leads",
    "held_out_loss", "task_score", "tflops_per_device", "mfu",
)  # fmt: skip
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")


def write_report(
    rows: Sequence[Row], output: Path, *, console: Console, title: str, force: bool = False
) -> Path:
    """Print the verdict and the table, write the figures and the page.

    Args:
        rows: In the order of the figures.
        output: Folder for ``report.html``, ``comparison.{csv,md,json}`` and ``*.png``; made if missing, files of these names
            are replaced.
        console: Where the table goes.
        title: Heading of the page.
        force: Write even where ``output`` holds other files.

    Returns:
        The path of ``report.html``.

    Raises:
        ValueError: The folder cannot be written, or has other files.
    """
    page, tables = output / "report.html", {"csv": _csv, "md": _markdown, "json": _json}
    names = [page.name, *(f"comparison.{kind}" for kind in tables), *(f"{spec.name}.png" for spec in FIGURES)]
    if not force:
        way_out = "Name another folder, or write into this one with --force."
        refuse_files(output, "--output", way_out, names, "a report")
    console.print(Text(verdict(rows), style="bold"))
    _print(rows, console)
    for kind, table in tables.items():
        write_file(output / f"comparison.{kind}", table(rows), "--output")
    charts = {}
    with styled():
        for spec in FIGURES:
            figure = spec.draw(rows)
            if figure is None:
                with contextlib.suppress(OSError):
                    (output / f"{spec.name}.png").unlink()  # of an earlier comparison
            else:
                drawn = io.BytesIO()
                figure.savefig(drawn, format="png", dpi=_PNG_DPI)
                write_file(output / f"{spec.name}.png", drawn.getvalue(), "--output")
                charts[spec.name] = as_svg(figure, spec.name)
    write_file(page, render_page(rows, title, charts).encode(errors="replace"), "--output")
    said = f"Report: {page}, table: {output}/comparison.{{csv,md,json}}, figures: {output}/*.png"
    console.print(Text(plain_text(said)), soft_wrap=True)
    return page


def _print(rows: Sequence[Row], console: Console) -> None:
    """Print the rows, what the columns mean, and what is wrong with each run."""
    shown, cells = shown_cells(rows)
    table = Table(caption=explain(rows, shown), caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index in shown:
        # In a narrow terminal the run's name is the last to be cut.
        table.add_column(COLUMNS[index], justify="left" if index < 3 else "right", no_wrap=index == 0)
    for line in cells:
        table.add_row(*map(Text, line))
    console.print(table)
    for row in rows:
        for problem in row.problems:
            console.print(Text.assemble((f"{row.run.name}:", "yellow"), f" {problem}"))


def _values(row: Row) -> dict[str, Any]:
    """The row unrounded, ``None`` for what is not known."""
    run, judged = row.run, row.judgement
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
        **{key: _finite(getattr(row, key)) for key in _NUMBERS},
        "outcome": judged and judged.outcome,
        "diverged_at": judged and judged.step,
        "noise_band_percent": judged and _finite(judged.band),
        "compared_steps": judged and judged.compared,
        "status": run.status,
        "log": plain_text(str(run.path)),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    lines = [{key: _cell(value) for key, value in _values(row).items()} for row in rows]
    writer = csv.DictWriter(out, list(lines[0]) if lines else [])
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _cell(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def _json(rows: Sequence[Row]) -> str:
    runs = [
        {**_values(row), "tasks": {t: _finite(v) for t, v in row.scores.items()}, "problems": row.problems}
        for row in rows
    ]
    found = {"verdict": verdict(rows), "models": [one.as_json() for one in verdicts(rows)], "runs": runs}
    return json.dumps(found, indent=2, allow_nan=False) + "\n"


def _markdown(rows: Sequence[Row]) -> str:
    shown, cells = shown_cells(rows)
    lines = [[COLUMNS[i] for i in shown], ["---" if i < 3 else "---:" for i in shown]]
    lines += [[_plain(cell) for cell in line] for line in cells]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    said = "\n\n".join(_plain(found.text) for found in verdicts(rows))
    problems = "".join(f"- {_plain(f'{row.run.name}: {said}')}\n" for row in rows for said in row.problems)
    return f"{said}\n\n{table}\n\n{explain(rows, shown)}\n" + (f"\n{problems}" if problems else "")


def _plain(text: str) -> str:
    """Text of others in Markdown: neither HTML nor links nor a new cell."""
    return re.sub(r"([\\|`*\[\]])", r"\\\1", html.escape(text, quote=False))
