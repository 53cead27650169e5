"""One training step under FSDP or HSDP at scale, on paper.

    step = max(host, (compute + overlap_slowdown * hidden) (1 + slowest(N)) + exposed)

``host`` is what the host needs to launch it all: a step that waits for its host hides communication in the GPU's idle time. ``hidden``
is the communication that runs beside computing, ``exposed`` what nothing hides, ``slowest(N)`` what waiting for the slowest of N GPUs
adds (:func:`slowest`). Under tensor parallelism a group of ``T`` GPUs on one node holds a part of
every matrix each, FSDP shards these parts over the GPUs of the same place, and four all-reduces a block of its tokens' activations (two in
forward, two in backward: Megatron-LM, arXiv 1909.08053, section 3) have nothing to hide behind. Pipelines are not planned: Composer has
none. It is for ranking layouts; nothing is fitted to the published points it is checked against
(``tests/planning/communication/test_published.py``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from statistics import NormalDist
from typing import Annotated, Literal

from foundry_fp8.config import Config, ConfigError, Fraction, Positive, accept, at_least
from foundry_fp8.distributed.compression.config import CompressionConfig
from foundry_fp8.distributed.compression.routing import path_of
from foundry_fp8.gpus import Gpu
from foundry_fp8.planning.communication import legs
from foundry_fp8.planning.communication.machines import Network, Share

__all__ = [
    "COMPRESSED", "Layout", "Workload", "best_layout", "largest_of", "layout", "plan_communication", "slowest",
]  # fmt: skip

MASTER_BYTES = 4  # of a float32 parameter, or of its gradient
ACTIVATION_BYTES = 2  # BF16
COMPRESSED = CompressionConfig(gradients="int8", parameters="e4m3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload(Config):
    """The model and the step."""

    key = "--"

    parameters: Annotated[float, at_least(1)]
    units: Positive
    """FSDP units: transformer blocks, as a rule."""
    tokens: Positive
    """Tokens a GPU and step."""
    idle: Annotated[float, at_least(0)] = 0.0
    """Of the parameters: those of experts that a token does not pass. They are gathered and reduced, and multiply nothing."""
    attention_flops: Annotated[float, at_least(0)] = 0.0
    """Of attention's two GEMMs, forward and backward, a token; the rest are ``6 * (parameters - idle)``, 4 of those that are frozen."""
    repeated: Share = 0.0
    """What checkpoints run again in the backward, over the model's FLOPs; MFU does not count it."""
    trained: Share = 1.0
    """Share of the parameters that train. What is frozen is gathered, and neither reduced nor held with a gradient."""
    mfu: Fraction = 0.4
    """Of the BF16 peak, of a GPU that computes alone."""
    compute_seconds: Annotated[float, at_least(0)] | None = None
    """Of a step of a GPU that computes alone, where it is known otherwise than by ``mfu``."""
    host_seconds: Annotated[float, at_least(0)] = 0.0
    """Of a step, to launch its kernels. FP8 layers launch several for one of BF16's: small models wait for it."""
    microbatches: Positive = 1
    """FSDP gathers and reduces for each."""
    sharding: Literal["FULL_SHARD", "SHARD_GRAD_OP"] = "FULL_SHARD"
    """``SHARD_GRAD_OP`` keeps what forward gathered for the backward."""
    parameter_bytes: Literal[2, 4] = 2
    """Of an element of an uncompressed gather: 4 under Composer's ``mixed_precision: FULL``."""
    gradient_bytes: Literal[2, 4] = 2
    """Of an element of an uncompressed reduction: 2 under Composer's ``mixed_precision: PURE``, 4 under ``DEFAULT``."""
    optimizer_bytes: Annotated[float, at_least(0)] = 8.0
    """Of a parameter's optimizer states: two float32 moments for AdamW."""
    tensor_parallel: Positive = 1
    """GPUs that share every matrix, and the tokens of one of them."""
    width: Annotated[float, at_least(0)] = 0.0
    """Elements of a token between blocks, which tensor parallelism reduces."""
    compression: CompressionConfig | None = None
    """``algorithms.compressed_communication``."""

    @property
    def flops(self) -> float:
        """Of the model, a GPU and step."""
        passed = self.parameters - self.idle
        return ((4 + 2 * self.trained) * passed + self.attention_flops) * self.tokens

    @property
    def forward_flops(self) -> float:
        """Of these, before the backward."""
        return (2 * (self.parameters - self.idle) + self.attention_flops / 3) * self.tokens


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to spread the model over the GPUs, and what the model says of it."""

    gpus: int
    shard: int
    communication_seconds: float
    exposed_seconds: float
    compute_seconds: float
    step_seconds: float
    memory_bytes: float
    fits: bool
    tensor_parallel: int = 1

    @property
    def replicate(self) -> int:
        """Copies of the model."""
        return self.gpus // self.tensor_parallel // self.shard

    @property
    def efficiency(self) -> float:
        """The share of a step that the same GPU would need alone."""
        return self.compute_seconds / self.step_seconds


def layout(work: Workload, gpus: int, shard: int, gpu: Gpu, network: Network) -> Layout:
    """The estimate for ``shard`` ranks a copy of the model, or of a GPU's part of it, on ``gpus`` GPUs.

    Raises:
        ConfigError: Training would refuse to compress on this layout, or tensor parallelism would cross nodes.
    """
    together, config = work.tensor_parallel, work.compression
    _check_together(work, gpus, network)
    replicate = gpus // together // shard
    parameters = work.parameters / together
    per_unit = parameters / work.units
    mine = per_unit / shard
    scope = "all" if config is None else config.scope
    route = functools.partial(path_of, world=gpus, per_node=network.gpus_per_node, scope=scope)
    sharing, replicas = route(range(shard)), route(range(0, gpus, shard))

    weights = None if config is None or sharing.why_not else config.wire(config.parameters)
    wires, sent = legs.Wires(network, gpu, config), work.gradient_bytes
    gather = wires.gather(per_unit, work.parameter_bytes, shard, weights, stride=together)
    scatter = wires.reduce_scatter(work.trained * per_unit, sent, shard, sharing, stride=together)
    reduce = wires.all_reduce(work.trained * mine, sent, replicate, replicas, stride=shard * together)
    activations = ACTIVATION_BYTES * work.tokens / work.microbatches * work.width
    joined = 4 * work.units * legs.collective_seconds(activations, together, network, shots=2)

    compute = work.compute_seconds or work.flops / together / (gpu.bf16_flops * work.mfu)
    compute /= work.microbatches
    forward = compute * work.forward_flops / (work.flops * (1 + work.repeated))
    backward = compute - forward
    again = gather if work.sharding == "FULL_SHARD" else 0.0
    one_forward, one_backward = work.units * gather, work.units * (again + scatter + reduce)
    # The first gather and the last reduction have nothing to hide behind.
    exposed = gather + max(0.0, one_forward - gather - forward)
    exposed += scatter + reduce + max(0.0, one_backward - scatter - reduce - backward)
    hidden = one_forward + one_backward - exposed
    exposed += joined
    computing = (compute + network.overlap_slowdown * hidden) * (1 + slowest(gpus, network))

    memory = parameters * (MASTER_BYTES * (1 + work.trained) + work.optimizer_bytes) / shard
    memory += 2 * work.parameter_bytes * per_unit
    if work.sharding == "SHARD_GRAD_OP":
        memory += work.parameter_bytes * (parameters - 2 * per_unit)
    if config is not None and config.uses_error_feedback and replicate > 1 and not replicas.why_not:
        # What quantising lost, carried to the next step.
        memory += 4 * work.trained * parameters / shard / replicas.inside
    return Layout(
        gpus=gpus,
        shard=shard,
        communication_seconds=work.microbatches * (one_forward + one_backward + joined),
        exposed_seconds=work.microbatches * exposed,
        compute_seconds=work.microbatches * compute,
        step_seconds=max(work.host_seconds, work.microbatches * (computing + exposed)),
        memory_bytes=memory,
        fits=memory <= gpu.memory_bytes,
        tensor_parallel=together,
    )


def _check_together(work: Workload, gpus: int, network: Network) -> None:
    together = work.tensor_parallel
    if together == 1:
        return
    if network.gpus_per_node % together or gpus % together:
        raise ConfigError(
            f"--tensor-parallel: {together} does not divide the {network.gpus_per_node} GPUs of a node, or {gpus} GPUs in all. Its "
            "all-reduces hide behind nothing: keep them inside a node."
        )
    if not work.width:
        raise ConfigError(
            "--width: 0, the elements of a token that tensor parallelism reduces. Give the model's."
        )
    if work.compression is not None:
        raise ConfigError(
            "algorithms.compressed_communication: it is not planned beside tensor parallelism. Leave one of the two out."
        )


def best_layout(work: Workload, gpus: int, gpu: Gpu, network: Network) -> Layout:
    """The shard degree with the shortest step of those that fit, the least communication among equals.

    Raises:
        ConfigError: Nothing fits; the memory of the smallest is named.
    """
    together, per_node = work.tensor_parallel, network.gpus_per_node
    degrees = [
        n
        for n in range(1, gpus // together + 1)
        if gpus // together % n == 0 and (n * together % per_node == 0 or per_node % (n * together) == 0)
    ]
    layouts, refused = [], None
    for shard in degrees:
        try:
            layouts.append(layout(work, gpus, shard, gpu, network))
        except ConfigError as error:  # training refuses it too
            refused = error
    if not layouts:
        assert refused is not None
        raise refused
    fitting = [one for one in layouts if one.fits]
    if not fitting:
        least = min(layouts, key=lambda one: one.memory_bytes)
        raise ConfigError(
            f"--gpus: {gpus} GPUs do not hold the model: {least.memory_bytes / 1e9:.0f} GB a GPU even with shard "
            f"{least.shard}, of {gpu.memory_bytes / 1e9:.0f} GB. Use more GPUs."
        )
    return min(fitting, key=lambda one: (round(one.step_seconds, 5), one.communication_seconds))


def plan_communication(
    work: Workload, gpus: Sequence[int], gpu: Gpu, network: Network
) -> list[dict[str, float | int | str]]:
    """Rows of the plan: for each number of GPUs, plain FSDP and the best HSDP, uncompressed and compressed.

    Where ``work`` names no compression, int8 gradients and e4m3 weights; under tensor parallelism uncompressed alone.
    """
    accept(Sequence[Annotated[int, at_least(2)]], gpus, "--gpus")
    config = work.compression or COMPRESSED
    wires = {"bf16": dataclasses.replace(work, compression=None)}
    if work.compression is not None or work.tensor_parallel == 1:
        wires[f"{config.gradients}/{config.parameters}"] = dataclasses.replace(work, compression=config)
    rows: list[dict[str, float | int | str]] = []
    for count in gpus:
        for wire, one in wires.items():
            for name, choose in (
                ("FSDP", functools.partial(layout, shard=count // work.tensor_parallel)),
                ("HSDP", best_layout),
            ):
                found = choose(one, gpus=count, gpu=gpu, network=network)
                rows.append(
                    {
                        "gpus": count,
                        "layout": f"{name} {found.replicate}x{found.shard}"
                        + (f" TP {found.tensor_parallel}" if found.tensor_parallel > 1 else ""),
                        "wire": wire,
                        "compute_ms": found.compute_seconds * 1e3,
                        "communication_ms": found.communication_seconds * 1e3,
                        "exposed_ms": found.exposed_seconds * 1e3,
                        "step_ms": found.step_seconds * 1e3,
                        "efficiency": found.efficiency,
                        "memory_gb": found.memory_bytes / 1e9,
                        "fits": int(found.fits),
                    }
                )
    return rows


def largest_of(count: int) -> float:
    """The expected largest of ``count`` standard normal numbers (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def slowest(gpus: int, network: Network) -> float:
    """The expected slowness of the slowest of ``gpus`` GPUs, as a share of the mean GPU's time; 0 for one, which waits for none.

    Two kinds of slowness, each with a source for its constants (:class:`Network`). All GPUs spread around their mean by ``gpu_spread``;
    and a host in ``1 / straggler_share`` is slower by ``straggler_slowdown`` with all of its GPUs. Of N GPUs on H hosts, ``z(n)`` the
    expected largest of n standard normal numbers:

        usual     = gpu_spread z(N)
        straggler = (1 + straggler_slowdown) (1 + gpu_spread z(GPUs of a host)) - 1
        expected  = usual + (1 - (1 - straggler_share)^H) max(0, straggler - usual)
    """
    if gpus == 1:
        return 0.0
    hosts = -(-gpus // network.gpus_per_node)
    usual = network.gpu_spread * largest_of(gpus)
    on_host = largest_of(min(gpus, network.gpus_per_node))
    straggler = (1 + network.straggler_slowdown) * (1 + network.gpu_spread * on_host) - 1
    return usual + (1 - (1 - network.straggler_share) ** hosts) * max(0.0, straggler - usual)
