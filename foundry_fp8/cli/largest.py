"""The largest microbatch that fits, by dry runs of a YAML's step: in BF16 and FP8, with and without compressed activations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing
from foundry_fp8.activations.compression.apply import (
    EXACT,
    ActivationCompressionConfig,
    apply_activation_compression,
)
from foundry_fp8.activations.compression.cross_entropy import lean_cross_entropy
from foundry_fp8.backends.size_rule import rates_of
from foundry_fp8.cli.cluster import cluster_of, limit_of
from foundry_fp8.cli.dry_run import convert, fake, step_of, without_flash
from foundry_fp8.cli.yaml_model import build_yaml_model, optimizer_bytes_of
from foundry_fp8.config import ConfigError, parse_bytes
from foundry_fp8.gpus import GPUS
from foundry_fp8.planning.memory.cluster import Cluster, on_cluster
from foundry_fp8.planning.memory.cost_model import CostModel
from foundry_fp8.planning.memory.flash_bytes import hold_flash_bytes
from foundry_fp8.planning.memory.plan import Measurements
from foundry_fp8.planning.memory.planner import measure_as_it_is

if TYPE_CHECKING:
    from foundry_fp8.run.settings import Run
    from foundry_fp8.surgery.fp8_config import FP8Config

__all__ = ["Largest", "largest_lines", "largest_microbatches", "largest_that_fits"]

DEVICE = torch.device("cpu")
MOST = 2**16
"""Sequences, where the YAML does not say how many a step has."""


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest microbatch of one precision and one way to keep activations."""

    fp8: bool
    compression: str
    """``off``, or the format of ``activation_compression``."""
    sequences: int
    """0 where not one fits."""
    peak: int
    """Bytes of a step with that, or with one sequence where not one fits."""
    seconds: float
    """That compressing takes, of a sequence."""


def largest_lines(
    config: dict[str, Any], run: Run, fp8: FP8Config, gpu: str, rate: Callable[[bool, int, float], float]
) -> Iterator[str]:
    """A table of :func:`largest_microbatches` on the GPU of that name.

    Args:
        config: The YAML, resolved.
        run: On as many ranks as are planned.
        fp8: What converts.
        gpu: Whose memory there is.
        rate: Tokens a second of a GPU, in FP8 or not, with microbatches of so many sequences, each of so many seconds of compressing.
    """
    limit, device_bytes, rates = (
        parse_bytes(limit_of(gpu), "--gpu"),
        GPUS[gpu].memory_bytes,
        rates_of(GPUS[gpu]),
    )
    cost_model = CostModel(flops_per_second=rates.bf16, bytes_per_second=rates.bandwidth)
    total = config.get("global_train_batch_size")
    most = max(1, total // run.ranks) if isinstance(total, int) else None
    known = f"; a step has {most} a GPU" if most else ""
    yield f"largest microbatch in {limit / 1e9:.0f} of {device_bytes / 1e9:.0f} GB, on {run.ranks} GPUs{known}"
    yield f"{'':10} {'compression':12} {'sequences':>9} {'GB':>7} {'tokens/s a GPU':>15}"
    for row in largest_microbatches(config, run, fp8, device_bytes, limit, most, cost_model):
        text = (
            f"{'FP8' if row.fp8 else 'BF16':10} {row.compression:12} {row.sequences:9d} {row.peak / 1e9:7.1f}"
        )
        if row.sequences:
            yield f"{text} {rate(row.fp8, row.sequences, row.seconds):15.0f}"
        else:
            yield f"{text}  one takes {(row.peak - limit) / 1e9:.1f} GB too many"


def largest_microbatches(
    config: dict[str, Any],
    run: Run,
    fp8: FP8Config,
    device_bytes: float,
    limit: int,
    most: int | None,
    cost_model: CostModel,
) -> Iterator[Largest]:
    """For BF16 and for ``fp8`` the largest microbatch, of at most ``most`` sequences, whose step takes at most ``limit`` bytes of a rank.

    Checkpoints and shards are those of ``run``. ``device_bytes`` are a GPU's.

    Raises:
        ConfigError: Checkpoints that a budget chooses, or that move to host memory.
    """
    own = run.activation_checkpointing
    if own is not None and (own.budget is not None or own.offload or own.policy == "offload"):
        raise ConfigError(
            "--largest: it takes checkpoints as they are, and algorithms.activation_checkpointing has a budget or offloads. Give it the "
            "targets that foundry-fp8 plan memory prints."
        )
    config = dict(config)
    stand_in = without_flash(config)
    asked = run.activation_compression or ActivationCompressionConfig()
    kinds = {"off": None, EXACT: {**asked.given, "format": EXACT}, asked.format: asked.given}
    for converts in (None, fp8):
        model = build_yaml_model(config, "meta")
        if stand_in:
            hold_flash_bytes(model)
        rank = _Rank(
            model, config, cluster_of(run, model, device_bytes), optimizer_bytes_of(model, config), cost_model
        )
        if rank.cluster.gathered == 2:
            model.to(torch.bfloat16)  # what FSDP gathers under mixed precision
        with fake(model):
            convert(model, dataclasses.replace(run, fp8=converts), config, 1, DEVICE)
            if own is not None or getattr(run.fsdp, "activation_checkpointing", False):
                apply_activation_checkpointing(model, **(own.given if own is not None else {}))
            plain = None
            for kind, options in kinds.items():
                sequences, peak, seconds = rank.largest(options, limit, most)
                plain = seconds if plain is None else plain
                yield Largest(converts is not None, kind, sequences, peak, max(seconds - plain, 0.0))


@dataclasses.dataclass(frozen=True)
class _Rank:
    """A rank of a run, whose model is on fake tensors."""

    model: Any
    config: dict[str, Any]
    cluster: Cluster
    optimizer_bytes: int
    cost_model: CostModel

    def largest(
        self, options: Mapping[str, Any] | None, limit: int, most: int | None
    ) -> tuple[int, int, float]:
        """The largest microbatch under ``options`` of ``activation_compression``, its peak, and the blocks' seconds of one sequence."""
        report = None if options is None else apply_activation_compression(self.model, **options)
        lean = report is not None and any(action == "fused loss" for _, action, _ in report.rows)
        step = functools.partial(
            step_of,
            self.model,
            self.config,
            device=DEVICE,
            loss=lean_cross_entropy if lean else F.cross_entropy,
        )

        @functools.cache
        def measured(sequences: int) -> Measurements:
            alone = measure_as_it_is(self.model, step(sequences), self.cost_model)
            return on_cluster(
                alone, self.model, self.cluster, optimizer_bytes=self.optimizer_bytes, accumulates=True
            )

        found = largest_that_fits(lambda sequences: measured(sequences).peak("none"), limit, most)
        if report is not None:
            report.undo()
        return found, measured(max(found, 1)).peak("none"), measured(1).seconds("none")


def largest_that_fits(peak: Callable[[int], int], limit: int, most: int | None = None) -> int:
    """The largest number of sequences, at most ``most``, whose peak is at most ``limit``; 0 where that of one is not.

    A peak is the largest of what a step holds at its moments, each of which grows by the sequence: beyond two peaks it lies on their
    line or above, and between them below. What the line rules out is not asked for.
    """
    low, high, guess = 1, (most or MOST) + 1, 2  # what fits, what does not, what is asked for next
    peaks = {1: peak(1)}
    if peaks[1] > limit:
        return 0
    while high - low > 1:
        peaks[guess] = peak(guess)
        each = (peaks[guess] - peaks[low]) / (guess - low)
        if peaks[guess] <= limit:
            low = guess
            reached = low + int((limit - peaks[low]) // each) if each > 0 else high
            high = min(high, reached + 1)
            guess = high - 1
        else:
            high = guess
            guess = max(low + int((limit - peaks[low]) // each), low + 1)
    return low
