"""How long FSDP and HSDP communicate at scale, with and without compression, on paper.

An alpha-beta model of ring collectives as NCCL's own tuner has it (``src/graph/tuning.cc``):

    all-gather, reduce-scatter   base + (steps - inter) a_inside + inter a_across + bytes / bus (N - 1) / N
    all-reduce                   twice the steps and twice the bytes

with ``steps = N - 1``, of which ``inter = nodes - 1`` cross nodes. It is for ranking layouts. What it leaves out: tree
all-reduce and PAT (which would lower latency at scale), congestion, stragglers, and copies. No constant is fitted to the
published points it is checked against; :func:`check_published` prints the error of each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Literal

from foundry_fp8.config import (
    Config,
    ConfigError,
    Fraction,
    Positive,
    PositiveNumber,
    accept,
    at_least,
)
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = [
    "GPUS",
    "NETWORKS",
    "Gpu",
    "Layout",
    "Network",
    "PublishedPoint",
    "Workload",
    "best_layout",
    "check_published",
    "collective_seconds",
    "plan_communication",
]


Seconds = Annotated[float, at_least(0)]
Gradients = Literal["bf16", "int8", "e4m3", "int4"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a GPU brings to the estimate."""

    memory_bytes: float
    bf16_flops: float
    """Dense peak."""
    hbm_bytes_per_second: float
    """What a fused quantiser reads and writes: three quarters of the data sheet's peak (assumed)."""
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network(Config):
    """Constants of the alpha-beta model; override any of them with a measured one (``dataclasses.replace``)."""

    key = "--set "

    gpus_per_node: Positive = 8
    inside_bus: PositiveNumber = 360e9
    """Ring bus bandwidth inside a node, bytes/s."""
    across_bus: PositiveNumber = 340e9
    """Ring bus bandwidth of a ring that crosses nodes (all NICs of a node together), bytes/s."""
    base_seconds: Seconds = 8.4e-6
    inside_seconds: Seconds = 3.4e-6
    """Latency of a ring step over NVLink."""
    across_seconds: Seconds = 14.0e-6
    """Latency of a ring step over the network."""
    source: str = ""


_NCCL = "latencies: NCCL src/graph/tuning.cc, ring, Simple protocol"

GPUS = {
    "h100-sxm": Gpu(
        memory_bytes=80e9,
        bf16_flops=989.4e12,
        hbm_bytes_per_second=2.5e12,
        source="NVIDIA H100 data sheet, dense",
    ),
    "h200-sxm": Gpu(
        memory_bytes=141e9,
        bf16_flops=989.4e12,
        hbm_bytes_per_second=3.6e12,
        source="NVIDIA H200 data sheet, dense",
    ),
    "a100-80g": Gpu(
        memory_bytes=80e9,
        bf16_flops=312e12,
        hbm_bytes_per_second=1.5e12,
        source="NVIDIA A100 data sheet, dense",
    ),
}
NETWORKS = {
    "h100-3200g": Network(source=f"8 x 400 Gbit/s a node, 85 % of 400 GB/s (assumed); {_NCCL}"),
    "h100-1600g": Network(across_bus=170e9, source=f"4 x 400 Gbit/s a node, 85 % (assumed); {_NCCL}"),
    "a100-400g": Network(
        inside_bus=230e9, across_bus=42.5e9, source=f"4 x 100 Gbit/s a node, 85 % (assumed); {_NCCL}"
    ),
    "ethernet-100g": Network(
        across_bus=10.6e9, source=f"one 100 Gbit/s port a node, 85 % (assumed); {_NCCL}"
    ),
}
OPTIMIZER_BYTES = 12  # float32 master weight and Adam's two moments, beside the working copy and the gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload(Config):
    """The model and the step."""

    key = "--"

    parameters: Annotated[float, at_least(1)]
    units: Positive
    """FSDP units: transformer blocks, as a rule."""
    tokens: Positive
    """Tokens a GPU and step."""
    mfu: Fraction = 0.4
    """Of the BF16 peak, while nothing is exposed."""
    microbatches: Positive = 1
    """FSDP gathers and reduces for each."""
    activation_bytes: Annotated[float, at_least(0)] = 0.0
    """What activations and buffers take on each GPU."""
    gradients: Gradients = "bf16"
    """What gradients travel as (int4 on the replicate leg, int8 on the shard leg)."""
    weights: Literal["bf16", "int8", "e4m3"] = "bf16"
    """What parameters travel as."""
    second_leg: Gradients = "bf16"
    """What the second half of the all-reduce travels as."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to spread the model over the GPUs, and what the model says of it."""

    gpus: int
    shard: int
    communication_seconds: float
    exposed_seconds: float
    compute_seconds: float
    memory_bytes: float
    fits: bool

    @property
    def replicate(self) -> int:
        """Copies of the model."""
        return self.gpus // self.shard

    @property
    def efficiency(self) -> float:
        """The share of a step that is not exposed communication."""
        return self.compute_seconds / (self.compute_seconds + self.exposed_seconds)


def bytes_per_element(name: str) -> float:
    """Bytes on the wire for one element, scales included."""
    return WireFormat(name=name).row_bytes(4096) / 4096  # type: ignore[arg-type]


def collective_seconds(
    nbytes: float, ranks: int, network: Network, *, stride: int = 1, shots: int = 1
) -> float:
    """Seconds of one ring collective.

    Args:
        nbytes: The whole tensor on the wire (an all-gather's output, a reduce-scatter's input).
        ranks: Of the group.
        network: The constants.
        stride: Distance between neighbours of the group: 1 for consecutive ranks, G for the replicas of shards of G.
        shots: 1 for all-gather and reduce-scatter, 2 for all-reduce.
    """
    if ranks < 2:
        return 0.0
    span = ranks * stride
    nodes = max(1, -(-span // network.gpus_per_node)) if stride < network.gpus_per_node else ranks
    steps, crossing = ranks - 1, min(nodes, ranks) - 1
    # Groups with a stride share a node's NICs: each of the node's GPUs is in a group of its own.
    sharing = min(stride, network.gpus_per_node)
    bus = network.inside_bus if nodes == 1 else network.across_bus / sharing
    latency = (steps - crossing) * network.inside_seconds + crossing * network.across_seconds
    return network.base_seconds + shots * (latency + nbytes / bus * steps / ranks)


def layout(work: Workload, gpus: int, shard: int, gpu: Gpu, network: Network) -> Layout:
    """The estimate for ``shard`` ranks a copy of the model on ``gpus`` GPUs."""
    replicate = gpus // shard
    per_unit = work.parameters / work.units
    weight, first = bytes_per_element(work.weights), bytes_per_element(work.gradients)
    shard_leg = bytes_per_element("int8" if work.gradients == "int4" else work.gradients)
    # A fused pass over BF16 elements moves 3 bytes each (2 + 1 byte of code); summing codes reads 1.
    one_pass = 3 * per_unit / gpu.hbm_bytes_per_second
    codes_weights, codes_gradients = work.weights != "bf16", work.gradients != "bf16"
    gather = collective_seconds(per_unit * weight, shard, network)
    if codes_weights and shard > 1:
        gather += one_pass * (1 / shard + 1)
    scatter = collective_seconds(per_unit * shard_leg, shard, network)
    if codes_gradients and shard > 1:
        scatter += one_pass * (1 + 1 / 3)
    second = bytes_per_element(work.second_leg) if codes_gradients else first
    mine = per_unit / shard
    reduce = collective_seconds(mine * first, replicate, network, stride=shard)
    reduce += collective_seconds(mine * second, replicate, network, stride=shard)
    if codes_gradients and replicate > 1:
        reduce += one_pass / shard * (1 + 1 / 3 + 1 / replicate + 1)

    tokens = work.tokens / work.microbatches
    compute = 6 * work.parameters * tokens / (gpu.bf16_flops * work.mfu)
    forward, backward = compute / 3, 2 * compute / 3
    one_forward, one_backward = work.units * gather, work.units * (gather + scatter + reduce)
    # The first gather and the last reduction have nothing to hide behind.
    exposed = gather + max(0.0, one_forward - gather - forward)
    exposed += scatter + reduce + max(0.0, one_backward - scatter - reduce - backward)
    memory = work.parameters * (2 + 2 + OPTIMIZER_BYTES) / shard + 2 * 2 * per_unit + work.activation_bytes
    return Layout(
        gpus=gpus,
        shard=shard,
        communication_seconds=work.microbatches * (one_forward + one_backward),
        exposed_seconds=work.microbatches * exposed,
        compute_seconds=work.microbatches * compute,
        memory_bytes=memory,
        fits=memory <= gpu.memory_bytes,
    )


def best_layout(work: Workload, gpus: int, gpu: Gpu, network: Network) -> Layout:
    """The shard degree with the least exposed communication of those that fit, the least communication among equals.

    Raises:
        ConfigError: Nothing fits; the memory of the smallest is named.
    """
    degrees = [
        n
        for n in range(1, gpus + 1)
        if gpus % n == 0 and (n % network.gpus_per_node == 0 or network.gpus_per_node % n == 0)
    ]
    layouts = [layout(work, gpus, shard, gpu, network) for shard in degrees]
    fitting = [one for one in layouts if one.fits]
    if not fitting:
        least = min(layouts, key=lambda one: one.memory_bytes)
        raise ConfigError(
            f"--gpus: {gpus} GPUs do not hold the model: {least.memory_bytes / 1e9:.0f} GB a GPU even with shard "
            f"{least.shard}, of {gpu.memory_bytes / 1e9:.0f} GB. Use more GPUs."
        )
    return min(fitting, key=lambda one: (round(one.exposed_seconds, 5), one.communication_seconds))


def plan_communication(
    work: Workload, gpus: Sequence[int], gpu: Gpu, network: Network, *, compressed: Workload | None = None
) -> list[dict[str, float | int | str]]:
    """Rows of the plan: for each number of GPUs, plain FSDP and the best HSDP, uncompressed and compressed.

    Args:
        work: The uncompressed workload.
        gpus: Numbers of GPUs, at least 2.
        gpu: The GPU.
        network: The network.
        compressed: The same workload compressed; int8 gradients (second leg too) and e4m3 weights where ``None``.
    """
    accept(Sequence[Annotated[int, at_least(2)]], gpus, "--gpus")
    if compressed is None:
        compressed = dataclasses.replace(work, gradients="int8", second_leg="int8", weights="e4m3")
    rows: list[dict[str, float | int | str]] = []
    for count in gpus:
        for wire, one in (("bf16", work), (f"{compressed.gradients}/{compressed.weights}", compressed)):
            for name, choose in (
                ("FSDP", functools.partial(layout, shard=count)),
                ("HSDP", best_layout),
            ):
                found = choose(one, gpus=count, gpu=gpu, network=network)
                rows.append(
                    {
                        "gpus": count,
                        "layout": f"{name} {found.replicate}x{found.shard}",
                        "wire": wire,
                        "compute_ms": found.compute_seconds * 1e3,
                        "communication_ms": found.communication_seconds * 1e3,
                        "exposed_ms": found.exposed_seconds * 1e3,
                        "efficiency": found.efficiency,
                        "memory_gb": found.memory_bytes / 1e9,
                        "fits": int(found.fits),
                    }
                )
    return rows


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
    network: Network = NETWORKS["h100-3200g"]
    gpu: Gpu = GPUS["h100-sxm"]


def _published() -> list[PublishedPoint]:
    aws = "AWS machine learning blog: FP8 on SageMaker P5, tables for 1B and 7B parameters"
    assumed = "8192 tokens a GPU and step; flat FSDP; BF16 communication in both columns"
    titan = "torchtitan, performance tables of December 2024, Llama 3.1 8B, H100"
    one = Workload(parameters=1e9, units=24, tokens=8192)
    seven = Workload(parameters=6.7e9, units=32, tokens=8192)
    llama = Workload(parameters=8.03e9, units=32, tokens=16384)
    nodes = (8, 16, 32, 64, 128, 256)

    def series(*values: float) -> dict[int, float]:
        return dict(zip(nodes, values, strict=True))

    return [
        PublishedPoint(
            name="AWS 1B BF16", source=aws, assumed=assumed, work=one,
            measured=series(40200, 38500, 39500, 38200, 35500, 33500),
        ),
        PublishedPoint(
            name="AWS 1B FP8", source=aws, assumed=assumed, work=one,
            measured=series(40800, 41600, 42000, 41800, 39500, 38000),
        ),
        PublishedPoint(
            name="AWS 7B BF16", source=aws, assumed=assumed, work=seven,
            measured=series(9350, 9400, 9300, 9250, 8700, 7900),
        ),
        PublishedPoint(
            name="AWS 7B FP8", source=aws, assumed=assumed, work=seven,
            measured=series(11000, 10750, 10600, 10400, 10100, 9700),
        ),
        PublishedPoint(
            name="torchtitan 8B BF16", source=titan, assumed="16384 tokens a GPU and step", work=llama,
            measured={8: 5762, 128: 5605},
        ),
        PublishedPoint(
            name="torchtitan 8B float8", source=titan, assumed="16384 tokens a GPU and step; float8 all-gather",
            work=dataclasses.replace(llama, weights="e4m3"), measured={8: 8532, 128: 8380},
        ),
    ]  # fmt: skip


def check_published() -> list[dict[str, float | int | str]]:
    """Predict every published point from the smallest of its series, and say how wrong the prediction is.

    The smallest size gives the compute time (its step less what the model says is exposed there). Nothing else is taken
    from the series.
    """
    rows: list[dict[str, float | int | str]] = []
    for point in _published():
        first = min(point.measured)
        step = point.work.tokens / point.measured[first]
        compute = step
        for _ in range(20):  # the exposed part depends on the compute it hides behind
            mfu = 6 * point.work.parameters * point.work.tokens / (point.gpu.bf16_flops * compute)
            work = dataclasses.replace(point.work, mfu=mfu)
            compute = step - layout(work, first, first, point.gpu, point.network).exposed_seconds
        for gpus, measured in point.measured.items():
            found = layout(work, gpus, gpus, point.gpu, point.network)
            predicted = point.work.tokens / (found.compute_seconds + found.exposed_seconds)
            rows.append(
                {
                    "series": point.name,
                    "gpus": gpus,
                    "published": measured,
                    "predicted": predicted,
                    "error_percent": 100 * (predicted / measured - 1),
                    "baseline": int(gpus == first),
                    "assumed": point.assumed,
                    "source": point.source,
                }
            )
    return rows
