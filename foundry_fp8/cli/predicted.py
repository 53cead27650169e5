"""A YAML's run on paper: converted as a GPU would have it, and how fast it is then."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from foundry_fp8.cli.cluster import shard_of
from foundry_fp8.cli.hardware import Hardware
from foundry_fp8.cli.plan_communication import workload_of
from foundry_fp8.config import ConfigError
from foundry_fp8.gpus import Gpu
from foundry_fp8.planning.communication.machines import NETWORKS
from foundry_fp8.planning.communication.step import Workload

if TYPE_CHECKING:
    from foundry_fp8.numerics.recipes import Recipe
    from foundry_fp8.planning.speed import Step
    from foundry_fp8.run.settings import Run
    from foundry_fp8.surgery.fp8_config import FP8Config
    from foundry_fp8.surgery.report import SurgeryReport

__all__ = ["NETWORK_OF", "converted_step", "gains", "needs_newer", "of_step", "on_paper", "prediction"]

NETWORK_OF = {"b200": "b200-3200g", "b300": "b300-6400g", "gb200": "gb200-nvl72"}
"""Between the nodes of a GPU; of others that of H100s."""


def on_paper(fp8: FP8Config, gpu: Gpu) -> dict[str, Any]:
    """The options with which this machine converts what ``gpu`` would: what is converted is a matter of the model."""
    from foundry_fp8.numerics.recipes import RECIPES

    chosen = {"recipe": RECIPES[gpu.recipe]()} if fp8.recipe == "auto" and gpu.recipe else {}
    elsewhere = {"backend": "emulated", "accumulation": "float32", "cache_weights": False, "fuse": False}
    return {**fp8.given, **elsewhere, "enabled": True, **chosen}


def needs_newer(recipes: Iterable[Recipe], name: str, gpu: Gpu) -> str | None:
    """Why one of ``recipes`` does not run on ``gpu``, which is called ``name``; ``None`` if all do."""
    newer = next((recipe.name for recipe in recipes if not recipe.runs_on_hopper), None)
    return (
        f"{newer} needs Blackwell; {name} runs current, delayed and block"
        if newer and gpu.recipe != "mxfp8"
        else None
    )


def gains(report: SurgeryReport, gpu: Gpu) -> tuple[int, dict[str, str]]:
    """The number of converted linears, and by name why FP8 makes some of them no faster on ``gpu``."""
    from foundry_fp8.backends.size_rule import rates_of, size_reason

    rates = rates_of(gpu)
    rows = [row for row in report.rows if row.action == "converted" and len(row.shape) == 2]
    reasons = {row.name: size_reason(report.recipe, row.shape[1], row.shape[0], rates) for row in rows}
    return len(rows), {name: reason for name, reason in reasons.items() if reason is not None}


def converted_step(model: Any, report: SurgeryReport, fp8: FP8Config, gpu: Gpu, length: int) -> Step:
    """What a step of ``model`` does, which was converted on paper; under ``auto`` without what gains nothing."""
    from foundry_fp8.layers.linear import FP8Linear
    from foundry_fp8.planning.speed import model_step
    from foundry_fp8.surgery.fusion import FusionPlan, plan_fusion

    left = gains(report, gpu)[1] if fp8.of_backend.only_where_faster else {}
    runs = {row.name for row in report.rows if row.action == "converted" and row.name not in left}
    converted = {n: m for n, m in model.named_modules() if isinstance(m, FP8Linear) and n in runs}
    fusion = FusionPlan() if fp8.fuse is False else plan_fusion(model, converted)
    return model_step(model, runs, set(fusion.norms), set(fusion.mlps), length)


def of_step(work: Workload, config: Mapping[str, Any], gpus: int) -> Workload:
    """``work``, which is of a microbatch, with all microbatches of a step on so many GPUs."""
    total, micro = config.get("global_train_batch_size"), config.get("device_train_microbatch_size")
    count = max(1, total // gpus // micro) if isinstance(total, int) and isinstance(micro, int) else 1
    return dataclasses.replace(work, tokens=count * work.tokens, microbatches=count)


def prediction(
    config: Mapping[str, Any], run: Run, fp8: FP8Config, model: Any, report: SurgeryReport, hardware: Hardware
) -> str | None:
    """How much faster a converted run is on ``hardware``, in one line; ``None`` where it runs several recipes, or the lines on ranks refuse it."""
    from foundry_fp8.planning.speed import USUAL_MFU, predict

    if len(report.recipes) != 1 or run.tensor_parallel:
        return None
    gpu, gpus = hardware.gpu, hardware.devices
    step = converted_step(model, report, fp8, gpu, config["max_seq_len"])
    try:
        work = of_step(workload_of(config, model), config, gpus)
    except ConfigError as error:  # a microbatch that Composer finds
        return f"not predicted: {error} to foundry-fp8 plan speed"
    try:
        shard = shard_of(run, model, gpu.memory_bytes, "--hardware")
    except ConfigError:
        return None
    network = NETWORKS[NETWORK_OF.get(hardware.name, "h100-3200g")]
    found = predict(step, work, report.recipe, gpus, shard, gpu, network, USUAL_MFU)
    linears, left = gains(report, gpu)
    return (
        f"predicted on {hardware.name}x{gpus}: {found.estimate:.2f} x BF16, {found.low:.2f} to {found.high:.2f}; {linears - len(left)} of "
        f"{linears} layers gain; foundry-fp8 plan speed says more"
    )
