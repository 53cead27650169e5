"""``foundry-fp8 policy RUN.yaml``: which recipe each GEMM of a run will have, or should have by what FP8 does to its gradients."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foundry_fp8.config import ConfigError, from_mapping

__all__ = ["policy"]


def policy(
    yaml: Annotated[
        Path,
        typer.Argument(help="An LLM Foundry training YAML with algorithms.fp8.", exists=True, dir_okay=False),
    ],
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Choose recipes by a batch of the YAML's data, and print rules to paste."
        ),
    ] = False,
    error: Annotated[
        float | None,
        typer.Option(
            help="With --measure: the largest gradient error of a block; 0.2, or what the YAML says."
        ),
    ] = None,
    recipes: Annotated[
        str, typer.Option(help="With --measure: what to choose from, separated by commas; what the GPU runs.")
    ] = "delayed,current,block",
    load: Annotated[
        Path | None,
        typer.Option(help="With --measure: a whole Composer checkpoint.", exists=True, dir_okay=False),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="With --measure: sequences of the batch.")] = 2,
) -> None:
    """Print the recipe of each GEMM of a YAML's model, without training it."""
    logging.disable(logging.WARNING)  # what libraries say while the model is built is not about this run
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = _measured(yaml, error, recipes, load, rows) if measure else _resolved(yaml)
    except (ConfigError, RuntimeError) as problem:
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(2) from problem
    finally:
        logging.disable(logging.NOTSET)
    typer.echo(said)


def _resolved(yaml: Path) -> str:
    """Of a model without weights. Who multiplies is a matter of the machine that trains: there it is asked again."""
    from foundry_fp8.cli.probe import fp8_options
    from foundry_fp8.cli.yaml_model import build_yaml_model, read_yaml
    from foundry_fp8.surgery.apply import apply_fp8

    config = read_yaml(yaml)
    given = fp8_options(config)
    options = {**given, "backend": "emulated", "cache_weights": False, "fuse": False}
    report = apply_fp8(build_yaml_model(config, "meta"), device="cpu", **options)
    backend = given.get("backend", "auto")
    report = dataclasses.replace(
        report, backend="native or transformer_engine" if backend == "auto" else backend
    )
    notes = {
        "auto": "recipe: auto is mxfp8 on GPUs of compute capability 10.x, and current elsewhere.\n",
        "measured": "recipe: measured chooses during the run; --measure does it now. Until then all layers run delayed here.\n",
    }
    recipe = options.get("recipe", "auto")
    name = recipe.get("name") if isinstance(recipe, Mapping) else recipe if isinstance(recipe, str) else ""
    return f"{notes.get(str(name), '')}{report.policy_table()}{report.summary().splitlines()[0]}"


def _measured(yaml: Path, error: float | None, recipes: str, load: Path | None, rows: int) -> str:
    import yaml as text

    from foundry_fp8.cli.probe import fp8_options, model_and_batch
    from foundry_fp8.cli.yaml_model import read_yaml
    from foundry_fp8.observe.measured_policy import measure_policy
    from foundry_fp8.surgery.apply import apply_fp8
    from foundry_fp8.surgery.policy import Measured

    config = read_yaml(yaml)
    options: dict[str, Any] = fp8_options(config)
    given = options.pop("recipe", None)
    fields = given if isinstance(given, Mapping) and given.get("name") == "measured" else {"name": "measured"}
    fields = {"recipes": recipes.split(","), **fields, **({} if error is None else {"error": error})}
    off = {"backend": "emulated", "cache_weights": False, "fuse": False, "attention": False}
    measured = from_mapping(Measured, fields, "algorithms.fp8.recipe")
    model, batch, loss_of = model_and_batch(config, load, rows, "--measure")
    apply_fp8(model, **{**options, **off, "recipe": measured})
    choice = measure_policy(model, loss_of, batch, error=measured.error, recipes=measured.recipes)
    said = f"{choice.table()}{choice.summary()}"
    if not any(choice.recipes.values()):
        return f"{said}\nalgorithms:\n  fp8:\n    enabled: false"
    rules = choice.rules()
    if "include" in options and "modules" not in rules[-1]:
        rules[-1] = {"modules": options["include"], **rules[-1]}
    kept = ("exclude", "keep_first_blocks", "keep_last_blocks", "wgrad")
    pasted: dict[str, Any] = {"recipe": rules, **{name: options[name] for name in kept if name in options}}
    return f"{said}\n{text.safe_dump({'algorithms': {'fp8': pasted}}, sort_keys=False, width=120)}".rstrip()
