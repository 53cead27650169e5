import io
import json
import re

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from foundry_fp8.cli.doctor import _notes, doctor, render


@pytest.fixture
def app():
    app = typer.Typer()
    app.command()(doctor)
    return app


def test_tables_name_every_recipe_and_print_each_reason_once(app):
    found = json.loads(CliRunner().invoke(app, ["--json"]).stdout)
    console = Console(width=1000, record=True, file=io.StringIO())
    console.print(render(found))
    text = console.export_text()
    linears = text[: text.index("FP8 attention (")]
    for entry in found["support"]:
        assert entry["recipe"] in text
        if not entry["ok"] and entry["backend"] != "auto":
            assert (
                len(re.findall(rf"{entry['backend']}, [a-z0-9, ]*: {re.escape(said(entry))}", linears)) == 1
            )
    for entry in found["attention"]:
        assert entry["case"] in text
        if not entry["ok"]:  # after the note on the recipes, once more for attention
            notes = text[text.index("FP8 attention (") :]
            assert len(re.findall(rf"{entry['backend']}, [^\n]*: {re.escape(said(entry))}", notes)) == 1
    for device in found["devices"]:
        assert device["name"] in text


def said(entry):
    return f"{entry['reason']}. {entry['remedy']}"


def test_a_reason_for_some_attentions_names_them():
    entries = [
        {
            "backend": "native",
            "recipe": "delayed",
            "case": case,
            "ok": case == "b",
            "reason": reason,
            "remedy": "Do.",
        }
        for case, reason in (("a", "one"), ("b", ""), ("c", "one"), ("d", "two"))
    ]

    def notes(entries):
        found = _notes(entries, lambda entry: f"{entry['recipe']}: {entry['case']}", "; ".join)
        return [note.plain for note in found]

    assert notes(entries) == ["native, delayed: a; delayed: c: one. Do.", "native, delayed: d: two. Do."]
    assert notes(entries[:1]) == ["native, every case: one. Do."]


def test_command_succeeds(app):
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0 and "transformer_engine" in result.stdout


def test_square_brackets_in_a_reason_are_text_not_markup():
    found = {
        "platform": {"torch": "2.7.0"},
        "devices": [
            {"device": "cpu", "name": "[bold]cpu", "count": 1, "capability": None, "memory_gib": None}
        ],
        "transformer_engine": {
            "version": None,
            "ok": False,
            "reason": "drivers ([])",
            "remedy": 'pip install "x[pytorch]"',
        },
        "support": [],
    }
    console = Console(width=1000, record=True, file=io.StringIO())
    console.print(render({**found, "support": _all_no(found), "attention": []}))
    text = console.export_text()
    assert "[bold]cpu" in text and "drivers ([])" in text and "x[pytorch]" in text


def _all_no(found):
    reason = {"reason": "because [this]", "remedy": ""}
    backends = ("transformer_engine", "native", "emulated", "auto")
    return [
        {"device": "cpu", "recipe": "delayed", "backend": backend, "ok": False, **reason}
        for backend in backends
    ]
