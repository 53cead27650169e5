"""The command: run the stages, judge the claims, write one folder."""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from foundry_fp8.config import ConfigError
from foundry_fp8.config.files import refuse_files, write_file

__all__ = ["selftest"]

OWN = ("selftest.*", "logs", "training", "training.yaml")
COLOURS = {"confirmed": "green", "refuted": "red", "not reached": "yellow"}


def selftest(
    output: Annotated[Path, typer.Option(help="Folder for everything that is found.")] = Path("selftest"),
    budget: Annotated[
        float | None,
        typer.Option(
            help="Seconds for all stages together; 530 on one GPU, 870 on several where not given.", min=1
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Names of stages, separated by commas; all of them where not given.")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="Every stage without a GPU, on two ranks of gloo. Measures nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that holds other files.")
    ] = False,
) -> None:
    """Run on GPUs what only they can show, and say which claims of the documents it confirms.

    Started alone it uses every GPU of this machine; on several machines start it through a launcher: composer -n 8 -m
    foundry_fp8.cli.main selftest, or torchrun. Each stage has processes of its own and a limit of its own. Needs no internet.
    """
    import torch
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from foundry_fp8.cli.selftest.claims import judge
    from foundry_fp8.cli.selftest.stages import run_stages, stages_of
    from foundry_fp8.cli.selftest.supervisors import Supervisors
    from foundry_fp8.cli.selftest.verdict import keep

    console = Console()
    if not dry and not torch.cuda.is_available():
        console.print(
            "There is no CUDA device here. foundry-fp8 selftest --dry tries the stages without one."
        )
        raise typer.Exit(2)
    output = output.resolve()
    supervisors = Supervisors(2 if dry else torch.cuda.device_count())
    if supervisors.rank:
        supervisors.follow()
        return
    stages = stages_of(output, dry=dry)
    if only is not None:
        wanted = [name.strip() for name in only.split(",")]
        unknown = [name for name in wanted if name not in {stage.name for stage in stages}]
        if unknown:
            console.print(f"--only: {unknown[0]!r} is none of: {'; '.join(stage.name for stage in stages)}.")
            raise typer.Exit(2)
        stages = [stage for stage in stages if stage.name in wanted]
    if not force:
        refuse_files(output, "--output", "Name another folder, or give --force.", OWN, "a self-test")
    output.mkdir(parents=True, exist_ok=True)
    outcomes: list[Any] = []
    started = time.monotonic()

    def said(outcome: Any) -> None:
        outcomes.append(outcome)
        console.print(
            f"{outcome.seconds:6.1f} s  {outcome.stage}: {outcome.state} {outcome.why}".rstrip(),
            highlight=False,
        )
        # Now, so that what was found survives what comes.
        _write(output, outcomes, judge(outcomes, dry=dry), started, dry)

    seconds = budget or (2000.0 if dry else 530.0 if supervisors.world == 1 else 870.0)
    run_stages(stages, output / "logs", seconds, dry=dry, supervisors=supervisors, said=said)
    verdicts = judge(outcomes, dry=dry)
    table = Table("verdict", "claim", "figures", title="What the documents claim", title_justify="left")
    for v in verdicts:
        remedy = f"\n{v.claim.next}\n{v.claim.avoid}".rstrip() if v.word == "refuted" else ""
        table.add_row(f"[{COLOURS[v.word]}]{v.word}[/]", escape(v.claim.quote), escape(v.figures + remedy))
    console.print(table)
    found = _write(output, outcomes, verdicts, started, dry)
    try:
        if not dry:
            keep(found)
    except ConfigError as error:
        console.print(f"doctor will not know of it: {error}", highlight=False, markup=False)
    console.print(f"Everything: {output}", soft_wrap=True, highlight=False)
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if failed or any(verdict.word == "refuted" for verdict in verdicts):
        raise typer.Exit(1)


def _write(
    output: Path, outcomes: list[Any], verdicts: list[Any], started: float, dry: bool
) -> dict[str, Any]:
    results = {o.stage: o.result or {} for o in outcomes}
    doctor = results.get("doctor", {})
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "dry": dry,
        "seconds": round(time.monotonic() - started, 1),
        "versions": doctor.get("platform"),
        "devices": doctor.get("devices"),
        "rates": results.get("kernels", {}).get("rates"),
        "claims": [
            {
                "claim": v.claim.quote,
                "verdict": v.word,
                "figures": v.figures,
                "next": v.claim.next if v.word == "refuted" else "",
                "avoid": v.claim.avoid if v.word == "refuted" else "",
                "keys": v.claim.keys,
            }
            for v in verdicts
        ],
        "stages": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    write_file(output / "selftest.json", json.dumps(found, indent=1) + "\n", "--output")
    return found
