"""``foundry-fp8``: the command line. One file a command; what takes long to import is imported inside the command."""

from __future__ import annotations

import errno
from typing import Any

import typer
from typer.core import TyperGroup

from foundry_fp8.cli import (
    compare,
    demo,
    doctor,
    export,
    init,
    plan_communication,
    plan_memory,
    policy,
    selftest,
    transfer,
)
from foundry_fp8.config import ConfigError

__all__ = ["app"]


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, OSError) as error:
            if getattr(error, "errno", None) == errno.EPIPE:  # who reads the output has gone; click's matter
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    name="foundry-fp8",
    help="FP8 training for MosaicML Composer and LLM Foundry.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
plan = typer.Typer(help="Estimate before a run what it will need.", no_args_is_help=True)

app.command("demo")(demo.demo)
app.command("compare")(compare.compare)
app.command("doctor")(doctor.doctor)
app.command("export")(export.export)
app.command("init")(init.init)
app.command("policy")(policy.policy)
app.command("selftest")(selftest.selftest)
app.command("transfer")(transfer.transfer)
app.add_typer(plan, name="plan")
plan.command("memory")(plan_memory.memory)
plan.command("communication")(plan_communication.communication)


@plan.callback()
def _plan() -> None:
    """Estimate before a run what it will need."""


if __name__ == "__main__":
    app()
