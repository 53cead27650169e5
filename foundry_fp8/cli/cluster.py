"""How the run of a YAML is spread over ranks, for plans of a machine that is not this one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foundry_fp8.cli.hardware import GPUS, PER_NODE
from foundry_fp8.config import ConfigError, Positive, accept, check_choice, from_mapping
from foundry_fp8.distributed.compression.config import KEY as COMPRESSION
from foundry_fp8.distributed.compression.config import CompressionConfig

if TYPE_CHECKING:
    from foundry_fp8.planning.memory.cluster import Cluster, Sharding

__all__ = ["cluster_of", "limit_of", "shard_of"]

USABLE = 0.95
"""Of a GPU's memory; the rest is CUDA's context, NCCL's buffers and what the allocator cannot use."""
HYBRID = {"HYBRID_SHARD": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


def cluster_of(config: Mapping[str, Any], world_size: int, sharding: str | None) -> Cluster:
    """The cluster of a YAML's ``fsdp_config``, ``hybrid_sharding`` and ``compressed_communication``.

    Args:
        config: The YAML, resolved.
        world_size: Ranks.
        sharding: Instead of ``fsdp_config.sharding_strategy``.

    Raises:
        ConfigError: No such strategy, or shards that do not divide the ranks.
    """
    from foundry_fp8.planning.memory.cluster import SHARDINGS, Cluster  # slow to import: torch's FSDP

    accept(Positive, world_size, "--world-size")
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
    half = config.get("precision", "amp_bf16") in ("amp_bf16", "amp_fp16") and strategy != "NO_SHARD"
    mixed = (fsdp or {}).get("mixed_precision", "DEFAULT") if half else "FULL"
    gathered, reduced = {"PURE": (2, 2), "DEFAULT": (2, 4)}.get(str(mixed), (4, 4))
    options = algorithms.get("compressed_communication")
    compression = None if options is None else from_mapping(CompressionConfig, options, COMPRESSION)
    keeps = compression is not None and compression.feeds_back and shard < world_size
    return Cluster(
        world_size=world_size,
        sharding=strategy,
        shard=shard,
        gathered=gathered,
        reduced=reduced,
        residual=4 if keeps else 0,
        fsdp=2 if os.environ.get("FSDP_VERSION") == "2" else 1,  # as Composer chooses
    )


def shard_of(config: Mapping[str, Any], ranks: int, key: str) -> int:
    """Ranks that share one copy of a model that is sharded: all, or those of ``hybrid_sharding``.

    Raises:
        ConfigError: They do not divide ``ranks``, which ``key`` gave.
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
        raise ConfigError(
            f"{key}: {ranks} cannot be divided into shards of {shard}, as algorithms.hybrid_sharding asks. Give a multiple of {shard}."
        )
    return shard


def limit_of(gpu: str) -> str:
    """What a run may take of a GPU's memory, as a budget."""
    check_choice("--gpu", gpu, tuple(GPUS))
    return f"{int(USABLE * GPUS[gpu].memory_bytes)}B"
