"""``foundry-fp8``: the command line. One file a command, imported when it is asked for: help and ``--version`` need no torch."""

from __future__ import annotations

import errno
import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import foundry_fp8
from foundry_fp8.config import ConfigError

__all__ = ["COMMANDS", "app", "imported"]

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "foundry-fp8": {
        "demo": ("demo", "Train a small GPT in high precision and once for each FP8 recipe; print a table and write a report."),
        "compare": ("compare", "Compare runs: speed, loss, MFU, kurtosis, FP8 health, memory, conversion, configuration."),
        "doctor": ("doctor", "Show what this machine can run (each recipe on each backend, or the reason why not), or what a YAML will do."),
        "export": ("export", "Write the FP8 weights that training multiplied with, and their scales, in a layout that vLLM reads (never run here)."),
        "init": ("init", "Add FP8, its monitors and its log to a YAML; comments and everything else stay as they are."),
        "policy": ("policy", "Print the recipe of each GEMM of a YAML's model, without training it."),
        "selftest": ("selftest", "Run on GPUs what only they can show, and say which claims of the documents it confirms."),
        "plan": ("", "Estimate before a run what it will need."),
    },
    "plan": {
        "speed": ("plan_speed", "Print how much faster FP8 is, by recipe and number of GPUs, with a range, and which layers gain nothing."),
        "memory": ("plan_memory", "Print a table of what each block could do, the plan, and the YAML that pins it."),
        "communication": ("plan_communication", "Print communication, exposed time and memory a GPU for FSDP and the best HSDP, with and without compression."),
    },
}  # fmt: skip
"""Of each group its commands: the file in this folder that has a function of that name, and the first sentence of its docstring."""

_PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
"""rich takes half of the time that help takes."""


class _Group(TyperGroup):
    """Names its commands without importing them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {
            name: TyperCommand(name, help=text) for name, (_, text) in COMMANDS[options["name"]].items()
        }

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Whole sentences, which click would cut to one line each."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help or "") for name, command in self.commands.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself, once it is asked for."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else imported(COMMANDS[self.name or ""][name][0], name), rest

    def invoke(self, ctx: Any) -> Any:
        """An error of what was given is one sentence, and exit status 2."""
        try:
            return super().invoke(ctx)
        except (ConfigError, OSError, ModuleNotFoundError) as error:
            if getattr(error, "errno", None) == errno.EPIPE:  # who reads the output has gone; click's matter
                raise
            needs = ". It reads runs as LLM Foundry does: pip install 'foundry_fp8[stack]'"
            missing = getattr(error, "name", "") in ("composer", "llmfoundry", "omegaconf")
            typer.echo(f"error: {error}{needs if missing else ''}", err=True)
            raise typer.Exit(2) from error


def imported(file: str, name: str) -> Any:
    """The command of that name, with its options."""
    if not file:
        return typer.main.get_command(_PLAN)
    one = typer.Typer(add_completion=False, **_PLAIN)
    one.command(name)(getattr(importlib.import_module(f"foundry_fp8.cli.{file}"), name))
    return typer.main.get_command(one)


def _typer(name: str, **options: Any) -> typer.Typer:
    return typer.Typer(name=name, cls=_Group, no_args_is_help=True, **_PLAIN, **options)


app = _typer("foundry-fp8", help="FP8 training for MosaicML Composer and LLM Foundry.")
_PLAN = _typer("plan", help=COMMANDS["foundry-fp8"]["plan"][1], add_completion=False)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"foundry-fp8 {foundry_fp8.__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it."),
) -> None: ...


@_PLAN.callback()
def _plan() -> None: ...


if __name__ == "__main__":
    app()
