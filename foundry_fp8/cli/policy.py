"""``foundry-fp8 policy RUN.yaml``: which recipe each GEMM of a run will have, or should have by what FP8 does to its gradients."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from foundry_fp8.cli.predicted import on_paper
from foundry_fp8.cli.quiet import quiet
from foundry_fp8.cli.yaml_model import Trust
from foundry_fp8.config import ConfigError
from foundry_fp8.gpus import GPUS

__all__ = ["policy"]


def policy(
    yaml: Annotated[
        Path, typer.Argument(help="A training YAML with algorithms.fp8.", exists=True, dir_okay=False)
    ],
    measure: Annotated[
        bool, typer.Option("--measure", help="Choose by a batch of its data, and print rules to paste.")
    ] = False,
    load: Annotated[
        Path | None,
        typer.Option(help="With --measure: a whole Composer checkpoint.", exists=True, dir_okay=False),
    ] = None,
    trust: Trust = False,
) -> None:
    """Print the recipe of each GEMM of a YAML's model, without training it."""
    try:
        with quiet():
            typer.echo(_measured(yaml, load, trust) if measure else _resolved(yaml, trust))
    except RuntimeError as problem:
        raise ConfigError(str(problem)) from problem


def _resolved(yaml: Path, trust: bool) -> str:
    """Of a model without weights; ``auto`` as on Hopper, ``measured`` before it measures."""
    from foundry_fp8.cli.probe import fp8_config
    from foundry_fp8.cli.yaml_model import build_yaml_model, read_yaml
    from foundry_fp8.cli.yaml_run import run_of
    from foundry_fp8.surgery.apply import apply_fp8
    from foundry_fp8.surgery.timing import Moment, clocks

    config = read_yaml(yaml, trust=trust)
    fp8 = fp8_config(config)
    report = apply_fp8(build_yaml_model(config, "meta"), device="cpu", **on_paper(fp8, GPUS["h100"]))
    asked = "native or transformer_engine" if fp8.backend == "auto" else fp8.backend
    report = dataclasses.replace(report, backend=asked)
    policy, length = fp8.policy(torch.device("cpu")), run_of(config).length
    times = clocks(policy.moments, length) if policy.moments else []
    begins = [" and ".join(f"{Moment(value, unit)}" for unit, value in at.items()) for at in times]
    holds = [", ".join(policy.held(at, length)) or "no rule holds" for at in times]
    lines = [f"from {when} on: {held}" for when, held in zip(begins, holds, strict=True)]
    return report.policy_table() + "\n".join([*lines, report.summary().splitlines()[0]])


def _measured(yaml: Path, load: Path | None, trust: bool) -> str:
    import yaml as text

    from foundry_fp8.cli.probe import fp8_config, model_and_batch
    from foundry_fp8.cli.yaml_model import read_yaml
    from foundry_fp8.observe.measured_policy import measure_policy
    from foundry_fp8.surgery.apply import apply_fp8
    from foundry_fp8.surgery.rules import Measured

    config = read_yaml(yaml, trust=trust)
    given = fp8_config(config)
    measured, options = given.recipe if isinstance(given.recipe, Measured) else Measured(), given.given
    recipes = measured.recipes or ("delayed", "current", "block")  # not all that is emulated here
    model, batch, loss_of = model_and_batch(config, load, 2, "--measure", trust=trust)
    apply_fp8(model, **{**on_paper(given, GPUS["h100"]), "attention": False, "recipe": measured})
    choice = measure_policy(model, loss_of, batch, error=measured.error, recipes=recipes)
    fp8: dict[str, Any] = {"enabled": False}
    if rules := choice.rules():
        if "include" in options and "modules" not in rules[-1]:
            rules[-1] = {"modules": options["include"], **rules[-1]}
        kept = ("exclude", "keep_first_blocks", "keep_last_blocks", "wgrad")
        fp8 = {"recipe": rules, **{name: options[name] for name in kept if name in options}}
    pasted = text.safe_dump({"algorithms": {"fp8": fp8}}, sort_keys=False, width=120).rstrip()
    return f"{choice.summary()}\n{pasted}"
