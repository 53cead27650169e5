"""``foundry-fp8 compare``: one table and one page from the logs of several runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

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
    fail_above: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            help="Exit with 1 if the loss of a model's best FP8 run is higher by more, if it diverged, or if nothing can be said.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that holds other files.")
    ] = False,
) -> None:
    """Compare runs: speed, loss, MFU, kurtosis, FP8 health, memory, conversion, configuration."""
    from rich.console import Console
    from rich.text import Text

    from foundry_fp8.config import check_choice
    from foundry_fp8.report.comparison import compare as compare_runs
    from foundry_fp8.report.runs import read_runs
    from foundry_fp8.report.sources.lines import plain_text
    from foundry_fp8.report.verdict import verdicts
    from foundry_fp8.report.write import write_report

    console = Console()
    try:
        check_choice("--percent-of", percent_of, ("baseline", "own"))
        if fail_above is not None and not math.isfinite(fail_above):
            raise ValueError(f"--fail-above {fail_above}: it is a number of percent.")
        rows = compare_runs(read_runs(runs), baseline=baseline, percent_of=percent_of)
        write_report(rows, output, console=console, title=title, force=force)
    except (FileNotFoundError, ImportError, ValueError) as error:
        console.print(Text(plain_text(str(error)), style="red"))
        raise typer.Exit(2) from error
    if fail_above is not None and not all(found.passes(fail_above) for found in verdicts(rows)):
        raise typer.Exit(1)
