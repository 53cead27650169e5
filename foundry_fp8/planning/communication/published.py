"""The model against published series of throughput over GPUs, and against the guess that nothing slows down."""

from __future__ import annotations

import dataclasses
import math

from foundry_fp8.distributed.compression.config import CompressionConfig
from foundry_fp8.planning.communication.machines import GPUS, NETWORKS, Gpu, Network
from foundry_fp8.planning.communication.step import Workload, layout

__all__ = ["Check", "PublishedPoint", "Skill", "check_published", "skill"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedPoint:
    """A published series: tokens per second and GPU at several sizes, all with flat FSDP."""

    name: str
    source: str
    assumed: str
    """What the source does not say and the check takes for granted."""
    work: Workload
    measured: dict[int, float]
    """GPUs: tokens per second and GPU. The smallest is the baseline that gives the compute time."""
    larger: str = ""
    """A larger model of the same source. This one, in FP8, computes as its BF16 series does, times what FP8 gains in the larger one; where its
    smallest size takes longer than that, it waits for its host."""
    network: Network = NETWORKS["h100-3200g"]
    gpu: Gpu = GPUS["h100-sxm"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One published point and its prediction, tokens per second and GPU."""

    series: str
    gpus: int
    published: float
    predicted: float
    unslowed: float
    """The series' smallest size: the guess that nothing slows down."""
    baseline: bool
    """The smallest size itself, which gives the compute time and is no test."""
    assumed: str
    source: str

    @property
    def error_percent(self) -> float:
        """Of the prediction."""
        return 100 * (self.predicted / self.published - 1)

    @property
    def unslowed_error_percent(self) -> float:
        """Of the guess that nothing slows down."""
        return 100 * (self.unslowed / self.published - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skill:
    """Errors over all tests, in percent."""

    tests: int
    rms: float
    largest: float
    unslowed_rms: float
    unslowed_largest: float

    @property
    def score(self) -> float:
        """The share of the unslowed guess's squared error that the model explains: 1 is all, 0 is none."""
        return 1 - (self.rms / self.unslowed_rms) ** 2


_AWS = "AWS machine learning blog: FP8 on SageMaker P5, tables for 1B and 7B parameters"
_TITAN = "torchtitan, performance tables of December 2024, Llama 3.1 8B, H100"
_FOUNDRY = "Databricks, LLM Foundry scripts/train/benchmarking/README.md, MPT in BF16, sequences of 2048"
_MPT = {  # parameters, blocks
    "125M": (125311488, 12),
    "350M": (355985408, 24),
    "760M": (760470528, 24),
    "1B": (1315950592, 24),
    "3B": (2651837440, 32),
    "7B": (6658859008, 32),
    "13B": (12853954560, 40),
    "30B": (29975214080, 48),
    "70B": (64862437376, 80),
}


def _aws(size: str, precision: str, *values: float) -> PublishedPoint:
    parameters, units = {"1B": (1e9, 24), "7B": (6.7e9, 32)}[size]
    waits = (size, precision) == ("1B", "FP8")
    return PublishedPoint(
        name=f"AWS {size} {precision}",
        source=_AWS,
        assumed="8192 tokens a GPU and step; flat FSDP; BF16 communication in both columns"
        + ("; 8 GPUs wait for their host (without that: -3.3 to -12.0 %)" if waits else ""),
        larger="AWS 7B" if waits else "",
        work=Workload(parameters=parameters, units=units, tokens=8192),
        measured=dict(zip((8, 16, 32, 64, 128, 256), values, strict=True)),
        network=NETWORKS["p5-efa"],
    )


def _titan(precision: str, measured: dict[int, float]) -> PublishedPoint:
    compression = CompressionConfig(gradients="none", parameters="e4m3") if precision == "float8" else None
    return PublishedPoint(
        name=f"torchtitan 8B {precision}",
        source=_TITAN,
        assumed="16384 tokens a GPU and step" + ("; float8 all-gather" if compression else ""),
        work=Workload(parameters=8.03e9, units=32, tokens=16384, compression=compression),
        measured=measured,
    )


def _h100(
    size: str, sequences: int, measured: dict[int, float], sharding: str = "FULL_SHARD"
) -> PublishedPoint:
    parameters, units = _MPT[size]
    return PublishedPoint(
        name=f"Databricks {size} H100" + (", 2 sequences" if sequences == 2 else ""),
        source=_FOUNDRY,
        assumed="3200 Gbit/s a node",
        work=Workload(
            parameters=parameters,
            units=units,
            tokens=2048 * sequences,
            sharding=sharding,  # type: ignore[arg-type]
            gradient_bytes=4,  # mixed_precision: DEFAULT
        ),
        measured=measured,
    )


def _a100(size: str, sequences: int, measured: dict[int, float]) -> PublishedPoint:
    parameters, units = _MPT[size]
    return PublishedPoint(
        name=f"Databricks {size} A100",
        source=f"{_FOUNDRY}, A100 40GB with 1600 Gbit/s a node",
        assumed="nothing" if size != "1B" else "32 GPUs left out: 18 % below 16 and 64 GPUs in the source",
        work=Workload(parameters=parameters, units=units, tokens=2048 * sequences),
        measured=measured,
        gpu=GPUS["a100-40g"],
        network=NETWORKS["a100-1600g"],
    )


def published() -> list[PublishedPoint]:
    """All series; within each, the number of tokens a GPU and step is the same."""
    return [
        _aws("1B", "BF16", 40200, 38500, 39500, 38200, 35500, 33500),
        _aws("1B", "FP8", 40800, 41600, 42000, 41800, 39500, 38000),
        _aws("7B", "BF16", 9350, 9400, 9300, 9250, 8700, 7900),
        _aws("7B", "FP8", 11000, 10750, 10600, 10400, 10100, 9700),
        _titan("BF16", {8: 5762, 128: 5605}),
        _titan("float8", {8: 8532, 128: 8380}),
        _h100("70B", 8, {128: 1058, 256: 1035, 512: 1007}),
        _h100("30B", 8, {128: 2199, 256: 2148, 512: 2115}),
        _h100("13B", 16, {128: 5080, 256: 4989, 512: 4952}),
        _h100("13B", 2, {8: 4792, 16: 4767, 32: 4811, 64: 4800}),
        _h100("7B", 6, {8: 10643, 128: 10475, 256: 10119, 512: 9670}),
        _h100("3B", 8, {128: 23422, 256: 22772, 512: 21664}, "SHARD_GRAD_OP"),
        _h100("1B", 12, {128: 44123, 256: 42555, 512: 39837}, "SHARD_GRAD_OP"),
        _a100("7B", 18, {32: 3725, 64: 3665, 128: 3623}),
        _a100("3B", 6, {32: 9914, 64: 9736, 128: 9538}),
        _a100("1B", 10, {64: 19001, 128: 18647}),
        _a100("760M", 12, {16: 29607, 32: 29648, 64: 29344, 128: 28940}),
        _a100("350M", 18, {16: 55413, 32: 53811, 64: 52689, 128: 51934}),
        _a100("125M", 26, {16: 130535, 32: 127122, 64: 125234, 128: 123936}),
    ]


def check_published() -> list[Check]:
    """Predict every published point from the smallest of its series, and of its siblings. Nothing else is taken from the series."""
    series = {point.name: point for point in published()}
    checks = []
    for point in series.values():
        first = min(point.measured)
        work = _waiting_for_its_host(point, series) if point.larger else _computing_alone(point)
        for gpus, measured in point.measured.items():
            found = layout(work, gpus, gpus, point.gpu, point.network)
            checks.append(
                Check(
                    series=point.name,
                    gpus=gpus,
                    published=measured,
                    predicted=work.tokens / found.step_seconds,
                    unslowed=point.measured[first],
                    baseline=gpus == first,
                    assumed=point.assumed,
                    source=point.source,
                )
            )
    return checks


def skill(checks: list[Check]) -> Skill:
    """The errors of the points that are tests."""
    tests = [check for check in checks if not check.baseline]
    errors = [abs(check.error_percent) for check in tests]
    unslowed = [abs(check.unslowed_error_percent) for check in tests]
    return Skill(
        tests=len(tests),
        rms=math.sqrt(sum(e**2 for e in errors) / len(errors)),
        largest=max(errors),
        unslowed_rms=math.sqrt(sum(e**2 for e in unslowed) / len(unslowed)),
        unslowed_largest=max(unslowed),
    )


def _computing_alone(point: PublishedPoint) -> Workload:
    """The workload with the MFU at which a step of its smallest size takes what was published."""
    gpus = min(point.measured)
    step = point.work.tokens / point.measured[gpus]
    alone = point.work.flops / (point.gpu.bf16_flops * step)  # if it did nothing but compute
    low, high = alone, 2 * alone
    for _ in range(50):
        middle = (low + high) / 2
        work = dataclasses.replace(point.work, mfu=min(middle, 1.0))
        slower = layout(work, gpus, gpus, point.gpu, point.network).step_seconds > step
        low, high = (middle, high) if slower else (low, middle)
    return dataclasses.replace(point.work, mfu=min(high, 1.0))


def _waiting_for_its_host(point: PublishedPoint, series: dict[str, PublishedPoint]) -> Workload:
    """The workload with the GPU's MFU from its siblings' smallest sizes, and the host's time from its own."""
    size = point.name.removesuffix(" FP8")
    bf16, larger_bf16, larger = (
        _computing_alone(series[name]).mfu
        for name in (f"{size} BF16", f"{point.larger} BF16", f"{point.larger} FP8")
    )
    host = point.work.tokens / point.measured[min(point.measured)]
    return dataclasses.replace(point.work, mfu=bf16 * larger / larger_bf16, host_seconds=host)
