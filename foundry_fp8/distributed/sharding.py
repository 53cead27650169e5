"""Over how many ranks one copy of a run's model is sharded, and how: one answer for training, ``doctor`` and the planners."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.hybrid_sharding.apply import HybridShardingConfig, degrees_of

__all__ = ["FSDP1_STRATEGIES", "Sharding", "degrees", "is_fsdp2", "sharding_of"]

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
FSDP1_STRATEGIES: dict[str, Sharding] = {
    "FULL_SHARD": "FULL_SHARD",
    "SHARD_GRAD_OP": "SHARD_GRAD_OP",
    "NO_SHARD": "NO_SHARD",
    "HYBRID_SHARD": "FULL_SHARD",
    "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP",
}
"""FSDP1's strategies -> how each copy of the model is sharded."""


def is_fsdp2(fsdp: Any) -> bool:
    """Whether ``fsdp`` is Composer's ``FSDP2Config``."""
    return hasattr(fsdp, "reshard_after_forward")


def sharding_of(fsdp: Any) -> Sharding:
    """How Composer's ``FSDPConfig`` or ``FSDP2Config`` shards each copy of the model; ``None`` is DDP."""
    if is_fsdp2(fsdp):
        return "FULL_SHARD" if fsdp.reshard_after_forward else "SHARD_GRAD_OP"
    return "NO_SHARD" if fsdp is None else FSDP1_STRATEGIES[fsdp.sharding_strategy.upper()]


def degrees(
    fsdp: Any,
    hybrid: HybridShardingConfig | None,
    model: nn.Module,
    *,
    world: int,
    per_node: int,
    device_bytes: float,
) -> tuple[int, int]:
    """``(replicate, shard)``: copies of the model, and the ranks over which each is sharded.

    ``model`` (not sharded yet) and ``device_bytes``, the memory of a device, are for ``shard: auto``; ``fsdp`` is ``None`` for
    DDP.

    Raises:
        ConfigError: They do not fit the ranks, or the model does not fit the devices.
    """
    if sharding_of(fsdp) == "NO_SHARD" or world == 1:
        return world, 1
    if hybrid is not None:
        return degrees_of(model, hybrid, world=world, per_node=per_node, device_bytes=device_bytes)
    # Composer's mesh: 2-D where a number of replicas is given, else 1-D, on which it runs HYBRID_SHARD as FULL_SHARD.
    replicate, shard = fsdp.data_parallel_replicate_degree, fsdp.data_parallel_shard_degree
    replicate = 1 if replicate is None else replicate
    if replicate == -1 and shard > 0:
        replicate = world // shard
    elif shard == -1 and replicate > 0:
        shard = world // replicate
    if replicate * shard != world or shard < 1:
        raise ConfigError(
            f"fsdp_config: data_parallel_replicate_degree {replicate} times data_parallel_shard_degree {shard} is not the {world} ranks "
            "of this job. Leave one of them out."
        )
    return replicate, shard
