"""``foundry-fp8 plan speed``: how much faster FP8 makes a YAML's run, by recipe and number of GPUs, and which layers gain."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from foundry_fp8.cli.cluster import refuse_tensor_parallelism
from foundry_fp8.cli.hardware import PER_NODE
from foundry_fp8.cli.plan_communication import counts_of, workload_of
from foundry_fp8.cli.predicted import NETWORK_OF, gains, needs_newer, planned
from foundry_fp8.cli.quiet import quiet
from foundry_fp8.cli.yaml_model import RunFile, Trust, read_yaml
from foundry_fp8.cli.yaml_run import run_of
from foundry_fp8.config import ConfigError, Fraction, accept, check_choice
from foundry_fp8.gpus import GPUS, gpu_named
from foundry_fp8.planning.communication.machines import NETWORKS

__all__ = ["speed"]


def speed(
    yaml: RunFile,
    gpu: Annotated[str, typer.Option(help=", ".join(name for name in GPUS if GPUS[name].recipe))] = "h100",
    gpus: Annotated[
        str | None, typer.Option(help="8..256 (doubling), or a list; by default 8,64,256, or as many shards where those are larger.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help=f"{', '.join(NETWORKS)}; by default one that goes with the GPU.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="A GPU and microbatch; by default those of device_train_microbatch_size.")
    ] = None,
    mfu: Annotated[
        float | None, typer.Option(help="Of your own BF16 run on few GPUs, as mfu_monitor logs it; 0.4 where it is not given.")
    ] = None,
    largest_microbatch: Annotated[
        bool, typer.Option("--largest-microbatch", help="Find by dry runs the most sequences that fit on the fewest of the GPUs, without and with activation_compression: minutes.")
    ] = False,
    trust: Trust = False,
) -> None:  # fmt: skip
    """Print how much faster FP8 is, by recipe and number of GPUs, with a range, and which layers gain nothing."""
    with quiet():
        counts = counts_of(gpus) if gpus else None
        lines = _lines(yaml, gpu_named(gpu), counts, network, tokens, mfu, largest_microbatch, trust)
    typer.echo("\n".join(lines))


def _lines(
    yaml: Path, name: str, given: list[int] | None, network: str | None, tokens: int | None, mfu: float | None,
    largest: bool, trust: bool,
) -> list[str]:  # fmt: skip
    from foundry_fp8.numerics.recipes import RECIPES
    from foundry_fp8.planning.speed import USUAL_MFU
    from foundry_fp8.surgery.report import kind_of

    kind = GPUS[name]
    if kind.recipe is None:
        raise ConfigError(f"--gpu: {name} does not multiply FP8.")
    network = network or NETWORK_OF.get(name, "h100-3200g")
    check_choice("--network", network, tuple(NETWORKS))
    usual = USUAL_MFU if mfu is None else accept(Fraction, mfu, "--mfu")
    config = read_yaml(yaml, trust=trust)
    run = run_of(config)
    refuse_tensor_parallelism(run)
    plan = planned(config, name)
    work, report = workload_of(config, plan.model, tokens), plan.report
    shard = getattr(run.hybrid_sharding, "shard", None)
    smallest = math.lcm(PER_NODE, shard) if isinstance(shard, int) else PER_NODE
    counts = given or [smallest, 8 * smallest, 32 * smallest]
    # Where the YAML names no recipe, each that the GPU runs.
    names = dict.fromkeys((report.recipe.name, "delayed", "current", "block"))
    recipes = report.recipes if run.fp8 else [RECIPES[recipe]() for recipe in names]
    if (newer := needs_newer(recipes, name, kind)) is not None:
        raise ConfigError(f"algorithms.fp8.recipe: {newer}.")
    again, left_out = plan.step.again, plan.checkpoints[1]
    measured = plan.gpu.measured and f", but {plan.gpu.measured}"
    repeated = again.flops / plan.step.flops if again else 0.0
    lines = [
        f"{work.parameters / 1e9:.2f} B parameters, {work.tokens} tokens a GPU and microbatch; checkpoints add {repeated:.0%} FLOPs",
        *([f"left out: {left_out}"] if left_out else []),
        f"{name}: {kind.source}, of which kernels reach the shares that an H100's reach{measured}; BF16 runs at {usual:.0%} MFU on few "
        f"GPUs ({'given' if mfu else 'assumed, before what is repeated' if again else 'assumed'}); network {network}",
        "",
        f"{'recipe':10} {'GPUs':>6} {'tokens/s a GPU':>15} {'MFU':>6}  over BF16",
    ]
    for recipe in (None, *recipes):
        for count in counts:
            rate, found = plan.speed(work, count, recipe, network=network, mfu=mfu)
            over = f"{found.estimate:.2f} ({found.low:.2f} to {found.high:.2f})" if recipe else "1"
            label = recipe.name if recipe else "BF16"
            lines.append(f"{label:10} {count:6d} {rate:15.0f} {found.mfu:6.1%}  {over}")
    linears, left = gains(report, plan.gpu)
    kinds = {kind_of(layer): f"{kind_of(layer)}: {why}" for layer, why in left.items()}
    lines += ["", f"{linears - len(left)} of {linears} linears gain from {report.recipe.name}"]
    lines += kinds.values()
    if largest:
        from foundry_fp8.cli.largest_microbatch import largest_microbatches

        lines += ["", *largest_microbatches(plan, min(counts), network=network, mfu=mfu)]
    return lines
