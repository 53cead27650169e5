"""How a YAML shards its run over ranks, for plans of a machine that is not this one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from foundry_fp8.cli.hardware import GPUS, PER_NODE
from foundry_fp8.config import ConfigError, Positive, accept, check_choice, from_mapping
from foundry_fp8.distributed.compression.config import KEY as COMPRESSION
from foundry_fp8.distributed.compression.config import CompressionConfig
from foundry_fp8.distributed.compression.routing import path_of

if TYPE_CHECKING:
    from foundry_fp8.planning.memory.cluster import Cluster, Sharding

__all__ = ["cluster_of", "limit_of", "refuse_tensor_parallelism", "shard_of", "wire_bytes"]

USABLE = 0.95
"""Share of a GPU's memory that a run can use; the rest is CUDA's context, NCCL's buffers and fragmentation."""
HYBRID = {"HYBRID_SHARD": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}  # -> each copy's
PRECISIONS: dict[str, Literal[2, 4]] = {"amp_bf16": 2, "amp_fp16": 2, "amp_fp8": 2, "fp32": 4}
"""Composer's ``precision`` -> bytes per element of the dtype that FSDP casts to."""
DTYPES: dict[str, Literal[2, 4]] = {
    "float32": 4,
    "fp32": 4,
    "float16": 2,
    "half": 2,
    "fp16": 2,
    "amp": 2,
    "fp8": 2,
    "float8": 2,
    "bfloat16": 2,
    "bfloat": 2,
    "bf16": 2,
    **PRECISIONS,
}
"""dtypes that Composer takes in ``mixed_precision`` (``composer.distributed.mosaic_parallelism._get_torch_dtype``) -> bytes."""


def cluster_of(config: Mapping[str, Any], world_size: int, sharding: str | None) -> Cluster:
    """The cluster of a YAML's ``fsdp_config``, ``hybrid_sharding`` and ``compressed_communication``.

    Args:
        config: The YAML, resolved.
        world_size: Ranks.
        sharding: Replaces ``fsdp_config.sharding_strategy``; ``None`` keeps it.

    Raises:
        ConfigError: An unknown strategy or precision, shards that do not divide the ranks, or tensor parallelism.
    """
    from foundry_fp8.planning.memory.cluster import SHARDINGS, Cluster  # slow to import: torch's FSDP

    accept(Positive, world_size, "--world-size")
    refuse_tensor_parallelism(config)
    fsdp = config.get("fsdp_config")
    algorithms = config.get("algorithms") or {}
    named = str((fsdp or {}).get("sharding_strategy", "FULL_SHARD")) if fsdp is not None else "NO_SHARD"
    if sharding is None:
        check_choice("fsdp_config.sharding_strategy", named, (*SHARDINGS, *HYBRID))
    else:
        check_choice("--sharding", sharding, SHARDINGS)
    chosen = sharding or HYBRID.get(named, named)
    strategy: Sharding = "NO_SHARD" if world_size == 1 else next(s for s in SHARDINGS if s == chosen)
    shard = 1 if strategy == "NO_SHARD" else shard_of(config, world_size, "--world-size")
    gathered, reduced = wire_bytes(config)
    if strategy == "NO_SHARD":  # DDP casts nothing: float32
        gathered = reduced = 4
    options = algorithms.get("compressed_communication")
    compression = None if options is None else from_mapping(CompressionConfig, options, COMPRESSION)
    return Cluster(
        world_size=world_size,
        sharding=strategy,
        shard=shard,
        gathered=gathered,
        reduced=reduced,
        residual=_residual(compression, world_size, shard),
        fsdp=2 if os.environ.get("FSDP_VERSION") == "2" else 1,  # as Composer chooses
    )


def wire_bytes(config: Mapping[str, Any]) -> tuple[Literal[2, 4], Literal[2, 4]]:
    """``(gathered, reduced)``: uncompressed bytes per element of the parameters that FSDP gathers and the gradients that it reduces.

    As ``composer.distributed.mosaic_parallelism.get_mixed_precision`` reads ``precision`` and ``fsdp_config.mixed_precision``: a name in
    upper or lower case, or a mapping of dtypes, in which ``reduce_dtype`` defaults to ``param_dtype``.

    Raises:
        ConfigError: Composer knows no such precision.
    """
    precision, key = config.get("precision", "amp_bf16"), "fsdp_config.mixed_precision"
    precision = precision.lower() if isinstance(precision, str) else precision
    check_choice("precision", precision, tuple(PRECISIONS))
    cast = PRECISIONS[precision]
    mixed = (config.get("fsdp_config") or {}).get("mixed_precision", "DEFAULT")
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


def refuse_tensor_parallelism(config: Mapping[str, Any]) -> None:
    """Refuse a YAML with tensor parallelism: LLM Foundry's shards only feed-forward matrices, and FP8 layers do not run under it.

    Raises:
        ConfigError: ``tp_config.tensor_parallel_degree`` is above 1, or no positive integer.
    """
    key = "tp_config.tensor_parallel_degree"
    degree = accept(Positive, (config.get("tp_config") or {}).get("tensor_parallel_degree", 1), key)
    if degree > 1:
        raise ConfigError(
            f"{key}: {degree}; plans of a YAML know no tensor parallelism, and FP8 layers do not run under it. Leave tp_config out "
            "here; `foundry-fp8 plan communication --tensor-parallel` estimates a model whose every matrix is shared."
        )


def shard_of(config: Mapping[str, Any], ranks: int, key: str) -> int:
    """The number of ranks that one copy of the model is sharded over: all, or ``hybrid_sharding.shard``.

    Raises:
        ConfigError: It does not divide ``ranks``, the value of the option ``key``.
    """
    hybrid = (config.get("algorithms") or {}).get("hybrid_sharding")
    named = (config.get("fsdp_config") or {}).get("sharding_strategy")
    if hybrid is None and named not in HYBRID:
        return ranks
    wanted = (hybrid or {}).get("shard", "node")
    if isinstance(wanted, int):
        accept(Positive, wanted, "algorithms.hybrid_sharding.shard")
    shard = wanted if isinstance(wanted, int) else min(PER_NODE, ranks) if wanted == "node" else ranks
    if ranks % shard:
        nearest = sorted({max(1, ranks // shard) * shard, -(-ranks // shard) * shard})
        raise ConfigError(
            f"{key}: {ranks} cannot be divided into shards of {shard}, as algorithms.hybrid_sharding asks. The nearest that can: "
            f"{' and '.join(map(str, nearest))}."
        )
    return shard


def limit_of(gpu: str) -> str:
    """The memory that a run may take of a GPU, as a budget in bytes (``76000000000B``); ``ConfigError`` for an unknown GPU."""
    check_choice("--gpu", gpu, tuple(GPUS))
    return f"{int(USABLE * GPUS[gpu].memory_bytes)}B"
