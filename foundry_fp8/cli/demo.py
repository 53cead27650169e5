"""``foundry-fp8 demo``: train one small model in high precision and in FP8 on this machine, and compare."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from foundry_fp8.cli.training import Progress, TrainingProcess

__all__ = ["demo"]

_HIGH_PRECISION = "high-precision"
_MPT, _FOG = "mpt-gqa", "fog"
_RECIPES = {_MPT: "delayed,mxfp8", _FOG: "delayed,delayed+attention"}
_POLL_SECONDS = 0.2


def demo(
    steps: Annotated[int, typer.Option(min=4, help="Batches to train each run for.")] = 64,
    recipes: Annotated[
        str | None,
        typer.Option(
            help="Recipes to compare with high precision, separated by commas; with FP8 attention: delayed+attention.  "
            f"[default: {_RECIPES[_MPT]}; of a FOG model {_RECIPES[_FOG]}]"
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for data, runs and the report.")] = Path("demo-runs"),
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the data.")] = 17,
    model: Annotated[
        str, typer.Option(help="mpt-gqa, or a FOG variant: fog-max, fog-opt, fog-flash, llama3, ...")
    ] = "mpt-gqa",
    yaml: Annotated[
        Path | None, typer.Option(help="LLM Foundry YAML to train instead of the model's own in yamls/demo.")
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder of Python files to learn from.  [default: this Python's standard library]"),
    ] = None,
) -> None:
    """Train a small GPT in high precision and once for each FP8 recipe; print a table and write a report.

    Every run goes through LLM Foundry's own train entry, with the same seed and the same batches.
    """
    from rich.console import Console

    import foundry_fp8
    from foundry_fp8.config import ConfigError, check_choice
    from foundry_fp8.layers.attention import AttentionRecipe
    from foundry_fp8.models.fog.config import VARIANTS
    from foundry_fp8.numerics.recipes import parse_recipe

    console = Console()
    family = _MPT if model == _MPT else _FOG
    given = _RECIPES[family] if recipes is None else recipes
    names = list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    try:
        for name in names:
            recipe, plus, option = name.partition("+")
            parsed = parse_recipe(recipe, "--recipes")
            if plus and (option != "attention" or not isinstance(parsed, AttentionRecipe)):
                raise ConfigError(
                    f"--recipes: {name!r}. What can follow a recipe is +attention, after delayed or current."
                )
        check_choice("--model", model, (_MPT, *VARIANTS))
        yaml = yaml or Path(foundry_fp8.__file__).parent / "yamls" / "demo" / f"{family}.yaml"
        data = _prepare(console, yaml, output, corpus)
    except (ConfigError, RuntimeError, FileNotFoundError) as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        raise typer.Exit(2) from error

    common = {"variables.data": data, "variables.global_seed": seed, "max_duration": f"{steps}ba"}
    if family == _FOG:
        common["variables.variant"] = model
    runs = {_HIGH_PRECISION: {**common, "run_name": _HIGH_PRECISION}}
    for name in names:  # delayed, or delayed+attention
        recipe, attention, _ = name.partition("+")
        runs[name] = {**common, "run_name": name, "algorithms.fp8.recipe": recipe}
        runs[name] |= {"algorithms.fp8.attention": True} if attention else {}
    started = time.monotonic()
    finished, failed, interrupted = _train_all(console, yaml, output, runs, steps)
    if finished:
        from foundry_fp8.report.comparison import compare
        from foundry_fp8.report.runs import read_runs
        from foundry_fp8.report.write import write_report

        rows = compare(read_runs([output / "runs" / name for name in finished]))
        title = "FP8 against high precision on this machine"
        write_report(rows, output / "report", console=console, title=title)
    console.print(f"{time.monotonic() - started:.0f} s after data preparation.", style="dim")
    if interrupted:
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _prepare(console: Console, yaml: Path, output: Path, corpus: Path | None) -> Path:
    """Make or find the data that the YAML's sizes ask for; returns its folder."""
    from omegaconf import OmegaConf

    from foundry_fp8.data import prepare_data

    if not yaml.exists():
        raise FileNotFoundError(f"--yaml: there is no {yaml}.")
    config = OmegaConf.load(yaml)
    with console.status("preparing data") as status:
        data = prepare_data(
            output / "data",
            vocab_size=OmegaConf.select(config, "variables.vocab_size", throw_on_missing=True),
            sequence_length=OmegaConf.select(config, "max_seq_len", throw_on_missing=True),
            corpus=corpus,
            say=lambda message: status.update(f"preparing data: {message}"),
        )
    console.print(
        f"Data: {data.documents} Python source files, {data.corpus_bytes / 1e6:.1f} MB, "
        f"{data.train_samples * data.sequence_length / 1e6:.1f} M training tokens in {data.folder}",
        highlight=False,
    )
    return data.folder


def _train_all(
    console: Console, yaml: Path, output: Path, runs: dict[str, dict], steps: int
) -> tuple[list[str], list[str], bool]:
    """Train the runs side by side; which left a log worth reading, which failed, and whether the user interrupted."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    together = min(len(runs), cores + 1)  # one more, so that of three the last has two cores to itself
    waiting, failed, interrupted, starting = list(runs), list[str](), False, False
    running: dict[str, TrainingProcess] = {}
    bars = Progress(
        TextColumn("{task.description}", justify="right"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    with bars:
        tasks = {name: bars.add_task(name, total=steps, start=False, status="waiting") for name in runs}
        try:
            while waiting or running:
                # One starts at a time: two that name their shared memory at once would take the same name (streaming 0.12).
                if waiting and len(running) < together and not starting:
                    name = waiting.pop(0)
                    folder = output / "runs" / name
                    running[name] = _start(bars, tasks[name], yaml, folder, runs[name], cores // together)
                time.sleep(_POLL_SECONDS)
                starting = False
                for name, process in list(running.items()):
                    code, now = process.returncode, process.progress()
                    starting |= code is None and not now.step
                    _show(bars, tasks[name], now)
                    if code is None:
                        continue
                    running.pop(name).stop()
                    if code:
                        failed.append(name)
                        bars.update(tasks[name], status=f"failed (exit {code})")
                        console.print(process.tail(), highlight=False, markup=False)
                        console.print(
                            f"The run failed; all of its output is in {process.output}.", style="red"
                        )
        except KeyboardInterrupt:
            interrupted = True
            console.print("Interrupted: the report shows what there is.")
        finally:
            for name, process in running.items():
                bars.update(tasks[name], status="stopped")
                process.stop()
    begun = [name for name in runs if name not in waiting]
    return [name for name in begun if _has_steps(output, name)], failed, interrupted


def _has_steps(output: Path, name: str) -> bool:
    return (output / "runs" / name / "run_log.jsonl").exists()


def _start(
    bars: Bars, task: TaskID, yaml: Path, folder: Path, overrides: dict, threads: int
) -> TrainingProcess:
    from foundry_fp8.cli.training import TrainingProcess, train_command

    command = train_command(yaml, {**overrides, "variables.run_folder": folder})
    shown = shlex.join(["python", *command[1:]])
    bars.console.print(f"$ {shown}", style="dim", highlight=False, markup=False, soft_wrap=True)
    bars.start_task(task)
    bars.update(task, status="starting")
    return TrainingProcess(command, folder, threads=max(1, threads))


def _show(bars: Bars, task: TaskID, now: Progress) -> None:
    if now.step:
        status = f"loss {now.loss:.3f}" if now.loss is not None else ""
        if now.tokens_per_second:
            status += f"  {now.tokens_per_second:,.0f} tokens/s"
        bars.update(task, completed=now.step, status=status)
