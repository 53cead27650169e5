"""The largest microbatch that fits, by dry runs of a YAML's step: in BF16 and in FP8, with and without compressed activations."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing
from foundry_fp8.activations.compression.apply import (
    ActivationCompressionConfig,
    apply_activation_compression,
)
from foundry_fp8.activations.compression.cross_entropy import lean_cross_entropy
from foundry_fp8.backends.size_rule import rates_of
from foundry_fp8.cli.cluster import cluster_of, limit_of
from foundry_fp8.cli.plan_communication import workload_of
from foundry_fp8.cli.plan_memory import convert, fake, step_of, without_flash
from foundry_fp8.cli.predicted import PlannedRun
from foundry_fp8.cli.yaml_model import build_yaml_model, optimizer_bytes_of
from foundry_fp8.cli.yaml_run import run_of
from foundry_fp8.config import ConfigError, parse_bytes
from foundry_fp8.gpus import GPUS
from foundry_fp8.planning.memory.cluster import Cluster, on_cluster
from foundry_fp8.planning.memory.cost_model import CostModel
from foundry_fp8.planning.memory.flash_bytes import hold_flash_bytes
from foundry_fp8.planning.memory.planner import measure_as_it_is

__all__ = ["largest_microbatches", "largest_that_fits"]

CPU = torch.device("cpu")
MOST = 2**16
"""Sequences, where the YAML does not say how many a step has."""


def largest_microbatches(plan: PlannedRun, gpus: int, *, network: str, mfu: float | None) -> Iterator[str]:
    """A table: for BF16 and FP8, by what is compressed, the largest microbatch of a planned run with its shards and checkpoints.

    Args:
        plan: The YAML's run.
        gpus: How many of them.
        network: Between nodes.
        mfu: Of the BF16 run.

    Raises:
        ConfigError: Checkpoints that a budget chooses, or that move to host memory.
    """
    config, gpu, fp8 = dict(plan.config), plan.name, plan.fp8
    recipe = plan.report.recipe if fp8.recipe == "auto" else fp8.recipe  # of the GPU, not of this machine
    run = dataclasses.replace(run_of(config, gpus), fp8=dataclasses.replace(fp8, enabled=True, recipe=recipe))

    def rate(converts: bool, sequences: int, seconds: float) -> float:
        asked = {**plan.config, "device_train_microbatch_size": sequences}
        work, recipe = workload_of(asked, plan.model), plan.report.recipe if converts else None
        plain = dataclasses.replace(plan, config=asked).speed(work, gpus, recipe, network=network, mfu=mfu)[0]
        return 1 / (1 / plain + seconds / config["max_seq_len"])  # compressing hides behind nothing

    own = run.activation_checkpointing
    if own is not None and (own.budget is not None or own.offload or own.policy == "offload"):
        raise ConfigError(
            "Checkpoints are taken as they are, and algorithms.activation_checkpointing has a budget or offloads. Give it the "
            "targets that foundry-fp8 plan memory prints."
        )
    rates, total = rates_of(GPUS[gpu]), config.get("global_train_batch_size")
    cost_model = CostModel(flops_per_second=rates.bf16, bytes_per_second=rates.bandwidth)
    limit = parse_bytes(limit_of(gpu), "--gpu")
    most = max(1, total // run.ranks) if isinstance(total, int) else MOST
    yield f"largest microbatch in {limit / 1e9:.0f} GB, on {run.ranks} GPUs, of at most {most} sequences"
    yield f"{'':10} {'compression':12} {'sequences':>9} {'GB':>7} {'tokens/s a GPU':>15}  over the first"
    first = 0.0
    stand_in, packs = without_flash(config), run.activation_compression or ActivationCompressionConfig()
    for label, converts in (("BF16", None), ("FP8", run.fp8)):
        model = build_yaml_model(config, "meta")
        if stand_in:
            hold_flash_bytes(model)
        cluster, states = cluster_of(run, model, GPUS[gpu].memory_bytes), optimizer_bytes_of(model, config)
        if cluster.gathered == 2:
            model.to(torch.bfloat16)  # what FSDP gathers under mixed precision
        found: list[tuple[str, int, int, float]] = []
        with fake(model):
            convert(model, dataclasses.replace(run, fp8=converts), config["max_seq_len"], CPU)
            if own is not None or getattr(run.fsdp, "activation_checkpointing", False):
                apply_activation_checkpointing(model, **(own.given if own else {}))
            for kind in dict.fromkeys(("off", "exact", packs.format)):
                undo, lean = (lambda: None), False
                if kind != "off":
                    report = apply_activation_compression(model, **{**packs.given, "format": kind})
                    undo, lean = report.undo, any(action == "fused loss" for _, action, _ in report.rows)
                held = functools.cache(
                    functools.partial(_held, model, config, cluster, states, cost_model, lean)
                )
                sequences = largest_that_fits(held, limit, most)
                (peak, _), (_, seconds) = held(max(sequences, 1)), held(1)
                undo()
                found.append((kind, sequences, peak, seconds))
        plain = found[0][3]
        for kind, sequences, peak, seconds in found:  # outside of the fake mode
            said = f"  one takes {(peak - limit) / 1e9:.1f} GB too many"
            if sequences:
                tokens = rate(converts is not None, sequences, max(seconds - plain, 0.0))
                first = first or tokens
                said = f"{tokens:15.0f}  {tokens / first:.2f}"
            yield f"{label:10} {kind:12} {sequences:9d} {peak / 1e9:7.1f} {said}"


def _held(
    model: Any, config: dict[str, Any], cluster: Cluster, states: int, cost_model: CostModel, lean: bool, sequences: int
) -> tuple[int, float]:  # fmt: skip
    """The peak of a step with microbatches of so many sequences, and the seconds of the blocks in one of them."""
    step = step_of(model, config, sequences, CPU, lean_cross_entropy if lean else F.cross_entropy)
    alone = measure_as_it_is(model, step, cost_model)
    there = on_cluster(alone, model, cluster, optimizer_bytes=states, accumulates=True)
    return there.peak("none"), there.seconds("none")


def largest_that_fits(held: Callable[[int], tuple[int, float]], limit: int, most: int) -> int:
    """The largest number of at most ``most`` sequences whose peak, the first that ``held`` gives, is at most ``limit``; 0 if one's is not.

    A peak is the largest of what a step holds at its moments, each of which grows by the sequence: beyond two peaks it lies on their
    line or above, and what the line rules out is not asked for.
    """
    one = held(1)[0]
    if one > limit or most == 1:
        return int(one <= limit)
    if (each := held(2)[0] - one) > 0:
        most = min(most, 1 + (limit - one) // each)
    if most < 3 or held(most)[0] <= limit:
        return most
    return bisect.bisect_left(range(1, most), True, key=lambda n: held(n)[0] > limit)
