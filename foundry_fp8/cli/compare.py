"""``foundry-fp8 compare``: one table and one page from the logs of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from foundry_fp8.report.comparison import PercentOf

__all__ = ["compare"]


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run logs, the trainer_state.json of Hugging Face's Trainer, W&B's offline files, TensorBoard's event files, MLflow stores, CSV files (step, loss, ...), or "
            "folders of such."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the page, the tables and the figures.")] = Path(
        "fp8-report"
    ),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "FP8 against high precision",
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Name (or glob) of the runs to hold others against.  [default: those in high precision]"
        ),
    ] = None,
    percent_of: Annotated[
        str,
        typer.Option(
            help="What % faster and % decrease are of: baseline, or own (the run's own speed, its own precision)."
        ),
    ] = "baseline",
) -> None:
    """Compare runs: speed, loss, MFU, kurtosis, FP8 health, memory, conversion, configuration."""
    from rich.console import Console

    from foundry_fp8.config import check_choice
    from foundry_fp8.report.write import report_runs

    console = Console()
    try:
        check_choice("--percent-of", percent_of, ("baseline", "own"))
        of: PercentOf = "own" if percent_of == "own" else "baseline"
        report_runs(runs, output, console=console, title=title, baseline=baseline, percent_of=of)
    except (FileNotFoundError, ImportError, ValueError) as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        raise typer.Exit(2) from error
