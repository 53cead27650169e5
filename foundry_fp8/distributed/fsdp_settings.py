"""What a run's FSDP settings say, whichever FSDP shards it, and over how many ranks one copy of its model is sharded."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.hybrid_sharding.apply import HybridShardingConfig, degrees_of

__all__ = ["FSDP1_STRATEGIES", "FSDPSettings", "Sharding", "degrees", "fsdp_version"]

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
FSDP1_STRATEGIES: dict[str, Sharding] = {
    "FULL_SHARD": "FULL_SHARD",
    "SHARD_GRAD_OP": "SHARD_GRAD_OP",
    "NO_SHARD": "NO_SHARD",
    "HYBRID_SHARD": "FULL_SHARD",
    "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP",
}
"""FSDP1's strategies -> how each copy of the model is sharded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FSDPSettings:
    """Of Composer's ``fsdp_config`` what this package asks for; the fields that an FSDP does not have keep their defaults."""

    version: Literal[1, 2] = 1
    sharding_strategy: str = "FULL_SHARD"
    reshard_after_forward: bool | int = True
    data_parallel_replicate_degree: int | None = None
    data_parallel_shard_degree: int = -1
    activation_checkpointing: bool = False
    activation_cpu_offload: bool = False
    load_monolith_rank0_only: bool = False

    @classmethod
    def of(cls, config: Any) -> FSDPSettings | None:
        """Those of Composer's ``FSDPConfig`` or ``FSDP2Config``; ``None`` where there is none."""
        if config is None:
            return None
        names = [field.name for field in dataclasses.fields(cls) if hasattr(config, field.name)]
        given = {name: getattr(config, name) for name in names}
        given["sharding_strategy"] = str(given.get("sharding_strategy", "FULL_SHARD")).upper()
        return cls(**given | {"version": 2 if "reshard_after_forward" in names else 1})

    @property
    def sharding(self) -> Sharding:
        """How each copy of the model is sharded."""
        if self.version == 2:
            return "FULL_SHARD" if self.reshard_after_forward else "SHARD_GRAD_OP"
        return FSDP1_STRATEGIES[self.sharding_strategy]


def fsdp_version() -> Literal[1, 2]:
    """Which FSDP Composer makes of an ``fsdp_config``."""
    return 2 if os.environ.get("FSDP_VERSION", "1") == "2" else 1


def degrees(
    fsdp: FSDPSettings | None,
    hybrid: HybridShardingConfig | None,
    model: nn.Module,
    *,
    world: int,
    per_node: int,
    device_bytes: float,
) -> tuple[int, int]:
    """``(replicate, shard)``: how many copies of the model a run has, and over how many ranks each is sharded.

    Args:
        fsdp: ``None`` for DDP.
        hybrid: ``algorithms.hybrid_sharding``, if the run has it.
        model: Not sharded yet; what ``shard: auto`` asks for its size.
        world: All ranks.
        per_node: Ranks on a node.
        device_bytes: Memory of a device, for ``shard: auto``.

    Raises:
        ConfigError: They do not fit the ranks, or the model does not fit the devices.
    """
    if fsdp is None or world == 1:
        return world, 1
    if hybrid is not None:
        return degrees_of(model, hybrid, world=world, per_node=per_node, device_bytes=device_bytes)
    if fsdp.sharding == "NO_SHARD":
        return world, 1
    # Composer's mesh: 2-D where a number of replicas is given, else 1-D, on which it runs HYBRID_SHARD as FULL_SHARD.
    replicate = fsdp.data_parallel_replicate_degree
    replicate, shard = 1 if replicate is None else replicate, fsdp.data_parallel_shard_degree
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
