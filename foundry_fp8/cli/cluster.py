"""How a YAML shards its run over ranks, for plans of a machine that is not this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from torch import nn

from foundry_fp8.cli.hardware import PER_NODE
from foundry_fp8.config import ConfigError, check_choice
from foundry_fp8.distributed.compression.config import CompressionConfig
from foundry_fp8.distributed.compression.routing import path_of
from foundry_fp8.distributed.sharding import degrees, is_fsdp2, sharding_of
from foundry_fp8.gpus import GPUS

if TYPE_CHECKING:
    from foundry_fp8.planning.memory.cluster import Cluster
    from foundry_fp8.run.settings import Run

__all__ = ["cluster_of", "limit_of", "refuse_tensor_parallelism", "shard_of", "wire_bytes"]

USABLE = 0.95
"""Share of a GPU's memory that a run can use; the rest is CUDA's context, NCCL's buffers and fragmentation."""
PRECISIONS: dict[str, Literal[2, 4]] = {"amp_bf16": 2, "amp_fp16": 2, "amp_fp8": 2, "fp32": 4}
"""Composer's ``precision`` -> bytes per element of the dtype that FSDP casts to."""
DTYPES: dict[str, Literal[2, 4]] = {
    "float32": 4,
    "fp32": 4,
    **dict.fromkeys(("float16", "half", "fp16", "amp", "fp8", "float8", "bfloat16", "bfloat", "bf16"), 2),
    **PRECISIONS,
}
"""dtypes that Composer takes in ``mixed_precision`` (``composer.distributed.mosaic_parallelism._get_torch_dtype``) -> bytes."""


def cluster_of(run: Run, model: nn.Module | None = None, device_bytes: float = 0) -> Cluster:
    """The cluster of a run: its sharding, the bytes that travel, the error feedback of its compressed communication.

    ``model`` and ``device_bytes``, the memory of a GPU, are for ``hybrid_sharding.shard: auto``.

    Raises:
        ConfigError: An unknown precision, shards that do not divide the ranks, or tensor parallelism.
    """
    from foundry_fp8.planning.memory.cluster import Cluster  # slow to import: torch's FSDP

    refuse_tensor_parallelism(run)
    shard = shard_of(run, model, device_bytes)
    alone = shard == 1 and not is_fsdp2(run.fsdp)
    gathered, reduced = (4, 4) if alone else wire_bytes(run)  # DDP casts nothing: float32
    return Cluster(
        world_size=run.ranks,
        sharding="NO_SHARD" if alone else sharding_of(run.fsdp),
        shard=shard,
        gathered=gathered,
        reduced=reduced,
        residual=_residual(run.compressed_communication, run.ranks, shard),
        fsdp=2 if is_fsdp2(run.fsdp) else 1,
    )


def wire_bytes(run: Run) -> tuple[Literal[2, 4], Literal[2, 4]]:
    """``(gathered, reduced)``: uncompressed bytes per element of the parameters that FSDP gathers and the gradients that it reduces.

    As ``composer.distributed.mosaic_parallelism.get_mixed_precision`` reads ``precision`` and ``fsdp_config.mixed_precision``: a name in
    upper or lower case, or a mapping of dtypes, in which ``reduce_dtype`` defaults to ``param_dtype``.

    Raises:
        ConfigError: Composer knows no such precision.
    """
    key = "fsdp_config.mixed_precision"
    check_choice("precision", run.precision, tuple(PRECISIONS))
    cast = PRECISIONS[run.precision]
    mixed = getattr(run.fsdp, "mixed_precision", "DEFAULT")
    if isinstance(mixed, Mapping):
        given = {name: mixed[name] for name in ("param_dtype", "reduce_dtype") if mixed.get(name) is not None}
        for name, dtype in given.items():
            check_choice(f"{key}.{name}", str(dtype).removeprefix("torch."), tuple(DTYPES))
        sizes = {name: DTYPES[str(dtype).removeprefix("torch.")] for name, dtype in given.items()}
        gathered = sizes.get("param_dtype", 4)
        return gathered, sizes.get("reduce_dtype", gathered)
    named = mixed.upper() if isinstance(mixed, str) else mixed
    check_choice(key, named, ("PURE", "DEFAULT", "FULL"))
    if named == "FULL":
        return 4, 4
    return cast, cast if named == "PURE" else 4


def _residual(compression: CompressionConfig | None, world_size: int, shard: int) -> float:
    """Bytes of error feedback per element of the gradients that replicas reduce; with two hops a rank keeps a part of its node's."""
    if compression is None or not compression.uses_error_feedback or shard == world_size:
        return 0.0
    path = path_of(range(0, world_size, shard), world=world_size, per_node=PER_NODE, scope=compression.scope)
    return 0.0 if path.why_not else 4 / path.inside


def refuse_tensor_parallelism(run: Run) -> None:
    """Refuse a run with tensor parallelism: LLM Foundry's shards only feed-forward matrices, which no plan knows.

    Raises:
        ConfigError: ``tp_config.tensor_parallel_degree`` is above 1.
    """
    if run.tensor_parallel:
        raise ConfigError(
            f"tp_config.tensor_parallel_degree: {run.tensor_parallel}; plans of a YAML know no tensor parallelism. "
            "Leave tp_config out here; `foundry-fp8 plan communication` estimates the run as if every matrix were shared."
        )


def shard_of(run: Run, model: nn.Module | None, device_bytes: float) -> int:
    """The number of ranks that one copy of the model is sharded over; raises as :func:`~foundry_fp8.distributed.sharding.degrees`."""
    ranks = {"world": run.ranks, "per_node": min(PER_NODE, run.ranks)}
    return degrees(run.fsdp, run.hybrid_sharding, model or nn.Module(), device_bytes=device_bytes, **ranks)[1]


def limit_of(gpu: str) -> str:
    """The memory that a run may take of a GPU, as a budget in bytes (``76000000000B``); ``ConfigError`` for an unknown GPU."""
    check_choice("--gpu", gpu, tuple(GPUS))
    return f"{int(USABLE * GPUS[gpu].memory_bytes)}B"
