"""``foundry-fp8 compare``: one table and one page from the logs of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["compare"]


def compare(
    runs: Annotated[list[Path], typer.Argument(help="run_log.jsonl files, or folders that hold one each.")],
    output: Annotated[Path, typer.Option(help="Folder for the page and the figures.")] = Path("fp8-report"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "FP8 against high precision",
) -> None:
    """Compare runs: speed, loss, MFU, kurtosis, FP8 health, memory, conversion, configuration."""
    from rich.console import Console

    from foundry_fp8.report.write import report_runs

    console = Console()
    try:
        report_runs(runs, output, console=console, title=title)
    except (FileNotFoundError, ValueError) as error:
        console.print(f"[red]{error}[/]", highlight=False)
        raise typer.Exit(2) from error
