"""The HTML page: one file, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from foundry_fp8.report.comparison import (
    COLUMNS,
    Row,
    config_differences,
    explain,
    format_row,
    guard_moves,
    shown_columns,
)
from foundry_fp8.report.figures import FIGURES

__all__ = ["render_page"]

_TEMPLATE = Path(__file__).with_name("template.html")


def render_page(rows: Sequence[Row], figures: Mapping[str, Figure], title: str) -> str:
    """The page as text.

    Args:
        rows: The comparison.
        figures: Drawn figures by :attr:`FigureSpec.name`; one that is missing is replaced by how to get it.
        title: The heading.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    runs = [row.run for row in rows]
    cells = [format_row(row) for row in rows]
    shown = shown_columns(cells)
    return template.render(
        title=title,
        columns=[COLUMNS[index] for index in shown],
        definitions=explain(rows, shown),
        cells=[[line[index] for index in shown] for line in cells],
        problems=[(run.name, run.problems) for run in runs if run.problems],
        sections=[
            {
                "name": spec.name,
                "title": spec.title,
                "caption": spec.caption,
                "without": spec.without,
                "source": _data_uri(figures[spec.name]) if spec.name in figures else None,
            }
            for spec in FIGURES
        ],
        conversions=[_conversion(row) for row in rows if row.run.conversion is not None],
        differences=config_differences(runs),
        run_names=[run.name for run in runs],
        facts=[_facts(row) for row in rows],
        moves=[(run.name, *move) for run in runs for move in guard_moves(run)],
        tables=[(run.name, table) for run in runs for table in run.tables],
    )


def _data_uri(figure: Figure) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def _conversion(row: Row) -> dict[str, Any]:
    report = row.run.conversion or {}
    modules = [module for module in report.get("rows") or [] if isinstance(module, Mapping)]
    attention = [module for module in report.get("attention") or [] if isinstance(module, Mapping)]
    skipped = Counter(str(m.get("reason")) for m in (*modules, *attention) if m.get("action") != "converted")
    recipe = report.get("recipe")
    fields = recipe if isinstance(recipe, Mapping) else {}
    return {
        "run": row.run.name,
        "recipe": ", ".join(f"{key} {value}" for key, value in fields.items() if key != "name"),
        "backend": report.get("chosen") or report.get("backend"),
        "converted": sum(m.get("action") == "converted" for m in modules),
        "total": len(modules),
        "share": report.get("converted_share"),
        "skipped": skipped.most_common(),
        "modules": modules,
        "attention": sum(m.get("action") == "converted" for m in attention),
        "attention_total": len(attention),
        "attentions": attention,
    }


def _facts(row: Row) -> tuple[str, list[tuple[str, str]]]:
    """What the header says of a run, as ``(label, text)``."""
    run, header = row.run, row.run.header
    facts = [
        ("log", str(run.path)),
        ("started", str(header.get("time", "unknown"))),
        ("status", run.status),
        ("steps", f"{run.step[-1]:,}" if len(run.step) else "none"),
        ("tokens", f"{run.tokens[-1]:,.0f}" if len(run.tokens) else "none"),
        ("device", f"{header.get('device', 'unknown')} ({header.get('device_type', 'unknown')})"),
        ("ranks x threads", f"{run.devices} x {header.get('threads', '?')}"),
        ("parameters", f"{header['parameters']:,}" if "parameters" in header else "unknown"),
    ]
    facts += [(name, str(version)) for name, version in (header.get("versions") or {}).items()]
    return run.name, facts
