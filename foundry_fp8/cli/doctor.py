"""``foundry-fp8 doctor``: what this machine can run and what the rest needs; or what a YAML's run will do."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from foundry_fp8.cli.quiet import quiet
from foundry_fp8.cli.yaml_model import Trust

__all__ = ["doctor", "render"]

_EMULATED_ATTENTION = Text(
    "The emulated backend takes every case of delayed and current on any device; the others have no FP8 attention."
)
_ORDER = ("native", "transformer_engine", "emulated", "auto")


def doctor(
    yaml: Annotated[
        Path | None,
        typer.Argument(
            help="An LLM Foundry training YAML, or the folder of a Hugging Face model: say what it will do, without starting it.",
            exists=True,
        ),
    ] = None,
    hardware: Annotated[str, typer.Option(help="What the YAML will run on: h100x8, b200x64, ...")] = "h100x8",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the facts as JSON instead of tables.")
    ] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure on a batch of the YAML's data which layers FP8 harms.")
    ] = False,
    load: Annotated[
        Path | None,
        typer.Option(help="With --probe: a whole Composer checkpoint.", exists=True, dir_okay=False),
    ] = None,
    trust: Trust = False,
) -> None:
    """Show what this machine can run (each recipe on each backend, or the reason why not), or what a YAML will do."""
    if load is not None and not probe:
        raise typer.BadParameter("--load names the checkpoint that --probe measures; add --probe")
    if probe:
        _probe(yaml, load, as_json, trust)
        return
    if yaml is not None:
        _examine(yaml, hardware, as_json, trust)
        return
    from foundry_fp8.backends.survey import collect

    found = collect()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(render(found))


def _probe(yaml: Path | None, load: Path | None, as_json: bool, trust: bool) -> None:
    from foundry_fp8.cli import probe

    if yaml is None:
        raise typer.BadParameter("--probe measures the run of a YAML: foundry-fp8 doctor RUN.yaml --probe")
    found = probe.probe_run(yaml, load, trust=trust)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
        return
    Console().print(probe.render(found))
    if found.exclude():
        typer.echo(
            f"Leave these in high precision:\nalgorithms:\n  fp8:\n    exclude: {json.dumps(found.exclude())}"
        )
    else:
        typer.echo(f"No layer is above the guard's limit of {found.limit:.0%} in {found.recipe}.")


def _examine(yaml: Path, hardware: str, as_json: bool, trust: bool) -> None:
    from foundry_fp8.cli.hardware import parse_hardware

    on = parse_hardware(hardware)  # before what takes long to import
    with quiet():
        from foundry_fp8.cli.run_check import check_run

        findings = check_run(yaml, on, trust=trust)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            lines = finding.text.splitlines()
            typer.echo(f"{finding.level:8} {finding.topic:14} {lines[0]}")
            for line in lines[1:]:
                typer.echo(f"{'':23} {line}")
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(2)


def render(found: dict[str, Any]) -> Group:
    """The result of :func:`foundry_fp8.backends.survey.collect` as tables."""
    parts: list[Any] = [_stack(found)]
    for device in found["devices"]:
        entries = [entry for entry in found["support"] if entry["device"] == device["device"]]
        parts += [Text(), _recipes(device, entries), Text()]
        parts += _notes([e for e in entries if e["backend"] != "auto"], lambda e: e["recipe"], ", ".join)
        attention = [entry for entry in found["attention"] if entry["device"] == device["device"]]
        parts += [
            Text(),
            _attention(device, attention),
            Text(),
            *_notes(attention, lambda e: f"{e['recipe']}: {e['case']}", "; ".join),
            _EMULATED_ATTENTION,
        ]
    return Group(*parts)


def _stack(found: dict[str, Any]) -> Table:
    table = Table(title="Stack", title_justify="left", show_header=False)
    for device in found["devices"]:
        name = device["name"] if device["count"] == 1 else f"{device['count']} x {device['name']}"
        if device["capability"] is None:
            name += " (no NVIDIA GPU)"
        else:
            name += f", compute capability {device['capability']}, {device['memory_gib']} GiB"
        table.add_row("device", escape(name))
    for key, value in found["platform"].items():
        note = found.get("untested", {}).get(key)
        said = escape(value) if value else "[dim]none[/dim]"
        table.add_row(key, f"{said} [yellow]({note})[/yellow]" if note else said)
    te = found["transformer_engine"]
    missing = f"[yellow]no[/yellow]: {escape(te['reason'])}. {escape(te['remedy'])}"
    table.add_row("transformer_engine", te["version"] if te["ok"] else missing)
    return table


def _recipes(device: dict[str, Any], entries: list[dict[str, Any]]) -> Table:
    table = Table(title=f"Recipes by backend on {device['device']}", title_justify="left")
    table.add_column("recipe")
    for backend in _ORDER:
        table.add_column(backend, no_wrap=True)
    for recipe in dict.fromkeys(entry["recipe"] for entry in entries):
        cells = {entry["backend"]: entry for entry in entries if entry["recipe"] == recipe}
        table.add_row(recipe, *(_cell(cells[backend]) for backend in _ORDER))
    return table


def _attention(device: dict[str, Any], entries: list[dict[str, Any]]) -> Table:
    table = Table(title=f"FP8 attention (attention: true) on {device['device']}", title_justify="left")
    backends = list(dict.fromkeys(entry["backend"] for entry in entries))
    for column in ("recipe", "case", *backends):
        table.add_column(column)
    cases: dict[tuple[str, str], dict[str, str]] = {(e["recipe"], e["case"]): {} for e in entries}
    for entry in entries:
        cases[entry["recipe"], entry["case"]][entry["backend"]] = _cell(entry)
    for names, cells in cases.items():
        table.add_row(*names, *(cells[backend] for backend in backends))
    return table


def _cell(entry: dict[str, Any]) -> str:
    if not entry["ok"]:
        return "[red]no[/red]"
    return f"[green]{entry.get('chosen', 'yes')}[/green]"


def _notes(
    entries: list[dict[str, Any]], name: Callable[[dict[str, Any]], str], join: Callable[[list[str]], str]
) -> list[Text]:
    """Each reason or remark once, with what it concerns."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for entry in entries:
        if entry["reason"]:
            reasons.setdefault((entry["backend"], entry["reason"], entry["remedy"]), []).append(name(entry))
    every = Counter(entry["backend"] for entry in entries)
    return [
        Text.assemble(
            (f"{backend}, {'every case' if len(names) == every[backend] else join(names)}: ", "bold"),
            f"{reason}. {remedy}".strip(),
        )
        for (backend, reason, remedy), names in reasons.items()
    ]
