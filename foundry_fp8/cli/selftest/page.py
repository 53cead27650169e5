"""The verdicts as a table in the terminal and as one HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from foundry_fp8.cli.selftest.claims import Verdict

__all__ = ["page", "table"]

_COLOURS = {"confirmed": "green", "refuted": "red", "not reached": "yellow"}

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>foundry_fp8 selftest</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1c2530; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem; font-size: 14px; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid #d8dee6; vertical-align: top; }
.confirmed, .passed { color: #14713d; } .refuted, .failed { color: #b3261e; } .reached, .time { color: #8a5a00; }
</style></head><body>
<h1>foundry_fp8 selftest</h1>
<p>{{ date }}, {{ seconds }} s.{% if dry %} Without a GPU: the host path of each stage. Nothing is measured.{% endif %}</p>
<h2>Claims</h2>
{{ rows(claims, ["verdict", "claim", "figures", "next", "avoid"]) }}
<h2>Stages</h2>
{{ rows(stages, ["state", "stage", "seconds", "why"]) }}
{% for stage in stages if stage.result and stage.result.rows %}
<h2>{{ stage.stage }}</h2>
{{ rows(stage.result.rows, columns(stage.result.rows)) }}
{% endfor %}
<h2>Machine</h2>
<table>{% for name, value in (versions or {}).items() %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}
{% for device in devices or [] %}<tr><td>{{ device.device }}</td><td>{{ device.name }} {{ device.capability or "" }}</td></tr>{% endfor %}
</table></body></html>
"""
_ROWS = """<table><tr>{% for c in columns %}<th>{{ c }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for c in columns %}<td class="{{ row[c] if loop.first else "" }}">{{ cell(row.get(c)) }}</td>{% endfor %}</tr>
{% endfor %}</table>"""


def table(verdicts: list[Verdict]) -> Table:
    """The verdicts, for a terminal."""
    from rich.markup import escape
    from rich.table import Table

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


def page(found: dict[str, Any]) -> str:
    """One HTML page of what ``selftest.json`` holds."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True)
    rows_template = environment.from_string(_ROWS)

    def rows(rows: list[dict[str, Any]], columns: list[str]) -> Markup:
        return Markup(rows_template.render(rows=rows, columns=columns, cell=_cell))

    def columns(rows: list[dict[str, Any]]) -> list[str]:
        return list(dict.fromkeys(key for row in rows for key in row))

    return environment.from_string(_TEMPLATE).render(**found, rows=rows, columns=columns)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
