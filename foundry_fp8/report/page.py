"""The HTML page: one file with its figures in it, nothing loaded from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from foundry_fp8.report.comparison import COLUMNS, UNKNOWN, Row, config_differences, explain, shown_cells
from foundry_fp8.report.figures import FIGURES
from foundry_fp8.report.figures_across import scored
from foundry_fp8.report.run import GUARD_EVENTS
from foundry_fp8.report.sources.lines import plain_text
from foundry_fp8.report.verdict import verdicts

__all__ = ["render_page"]

_TEMPLATE = Path(__file__).with_name("template.html")


def render_page(rows: Sequence[Row], title: str, charts: Mapping[str, str]) -> str:
    """The page as text, with the figures as SVG by name; what has none gets a line at the end that says how to get it."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    runs = [row.run for row in rows]
    shown, cells = shown_cells(rows)
    return template.render(
        title=title,
        verdicts=verdicts(rows),
        columns=[COLUMNS[index] for index in shown],
        definitions=explain(rows, shown),
        cells=cells,
        problems=[(row.run.name, row.problems) for row in rows if row.problems],
        figures=FIGURES,
        charts=charts,
        conversions=[_conversion(row) for row in rows if row.run.conversion is not None],
        differences=config_differences(runs),
        run_names=[run.name for run in runs],
        facts=[_facts(row) for row in rows],
        scores=_scores(rows),
        guarded=[
            (run.name, batch, unit, f"{action} {signal}".strip() + (f": {detail}" if detail else ""))
            for run in runs
            for batch, unit, action, signal, detail in run.guard_events
        ],
        tables=[(run.name, table) for run in runs for table in run.tables if table.name != GUARD_EVENTS],
    )


def _scores(rows: Sequence[Row]) -> dict[str, Any]:
    """Runs by tasks, in %, as text; in the manner of FOG's table 1."""
    names, shown = scored(rows)
    lines = [
        [row.run.name, *(f"{100 * row.scores[n]:.1f}" if n in row.scores else UNKNOWN for n in names)]
        for _, row in shown
    ]
    return {"columns": ["Run", *names], "lines": lines}


def _conversion(row: Row) -> dict[str, Any]:
    report = row.run.conversion or {}
    modules = [module for module in report.get("rows") or [] if isinstance(module, Mapping)]
    attention = [module for module in report.get("attention") or [] if isinstance(module, Mapping)]
    skipped: Counter[str] = Counter()
    for module in (*modules, *attention):
        if module.get("action") != "converted":
            skipped[str(module.get("reason"))] += _count(module)
    recipe = report.get("recipe")
    fields = recipe if isinstance(recipe, Mapping) else {}
    return {
        "run": row.run.name,
        "recipe": ", ".join(f"{key} {value}" for key, value in fields.items() if key != "name"),
        "backend": report.get("chosen") or report.get("backend"),
        "converted": sum(_count(m) for m in modules if m.get("action") == "converted"),
        "total": report.get("total") or sum(map(_count, modules)),
        "left_out": report.get("left_out", 0),
        "share": report.get("converted_share"),
        "skipped": skipped.most_common(),
        "modules": modules,
        "attention": sum(_count(m) for m in attention if m.get("action") == "converted"),
        "attention_total": sum(map(_count, attention)),
        "attentions": attention,
    }


def _count(module: Mapping[str, Any]) -> int:
    """How many a row stands for."""
    return int(module.get("count") or 1)


def _facts(row: Row) -> tuple[str, list[tuple[str, str]]]:
    """What the header says of a run, as ``(label, text)``."""
    run, header = row.run, row.run.header
    facts = [
        ("log", plain_text(str(run.path))),
        ("started", str(header.get("time", "unknown"))),
        ("status", run.status),
        ("steps", f"{run.step[-1]:,}" if len(run.step) else "none"),
        ("tokens", f"{run.tokens[-1]:,.0f}" if len(run.tokens) else "none"),
        ("device", f"{header.get('device', 'unknown')} ({header.get('device_type', 'unknown')})"),
        ("ranks x threads", f"{run.devices} x {header.get('threads', '?')}"),
        ("parameters", f"{header['parameters']:,}" if header.get("parameters") else "unknown"),
    ]
    peak = run.metrics.get("mfu/effective_peak")
    if peak is not None and len(peak.values):
        facts.append(("effective peak", f"{peak.values[-1]:,.0f} TFLOP/s"))
    facts += [(name, str(version)) for name, version in (header.get("versions") or {}).items()]
    return run.name, facts
