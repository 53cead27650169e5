"""How many ranks shard and how many replicate, and the mesh for it. Needs torch alone."""

from __future__ import annotations

import dataclasses
import logging
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn

from foundry_fp8.config import Config, ConfigError, Fraction, Natural, Positive
from foundry_fp8.distributed.attendance import agree
from foundry_fp8.distributed.mesh import alone, hybrid_mesh, ranks_per_node, smallest_shard

__all__ = ["KEY", "HybridShardingConfig", "degrees_of", "hybrid_degrees", "hybrid_mesh", "state_bytes"]

KEY = "algorithms.hybrid_sharding"
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridShardingConfig(Config):
    """The shape of the mesh."""

    key = KEY
    deprecated: ClassVar = {"replicate": lambda _: {}}

    shard: Literal["node", "auto"] | Positive = "auto"
    """Ranks that share one copy of the model: those of a node, a number, or the smallest group whose state fits. The others have copies."""
    state_fraction: Fraction = 0.6
    """How much of a device's memory the model's state may take, for ``shard: auto``; the rest is for activations."""
    optimizer_bytes: Natural = 8
    """Bytes of optimizer state a parameter, for ``shard: auto``: 8 for Adam's two float32 moments."""
    check_replicas: bool = True
    """Compare the bits of all replicas when attaching and after the first optimizer step, and raise if they differ."""


def state_bytes(model: nn.Module, optimizer_bytes: int = 8) -> int:
    """Bytes of parameters, their gradients and the optimizer's state, unsharded. Parameters on ``meta`` count too."""
    return sum(
        p.numel() * (p.element_size() + (p.element_size() + optimizer_bytes if p.requires_grad else 0))
        for p in model.parameters()
    )


def hybrid_degrees(
    model: nn.Module, config: HybridShardingConfig, *, device: torch.device
) -> tuple[int, int]:
    """The degrees ``(replicate, shard)`` for this job; ``(1, 1)`` and a warning where it has one rank.

    ``model`` is not wrapped yet; for ``shard: auto`` the device is asked for its memory.

    Raises:
        ConfigError: They do not fit the ranks, or the model does not fit the devices.
        RuntimeError: Ranks disagree.
    """
    if alone():
        log.warning("%s: this job has one rank, so there is nothing to shard or to replicate.", KEY)
        return 1, 1
    device_bytes = 0
    if config.shard == "auto":
        if device.type != "cuda":
            raise ConfigError(
                f"{KEY}.shard: auto asks the GPU for its memory, and this run is on {device.type}."
            )
        device_bytes = torch.cuda.get_device_properties(device).total_memory
    world, per_node = dist.get_world_size(), ranks_per_node()
    degrees = degrees_of(model, config, world=world, per_node=per_node, device_bytes=device_bytes)
    agree(KEY, repr(degrees))
    return degrees


def degrees_of(
    model: nn.Module, config: HybridShardingConfig, *, world: int, per_node: int, device_bytes: float
) -> tuple[int, int]:
    """The degrees ``(replicate, shard)`` of a job of ``world`` ranks, ``per_node`` on a node, with ``device_bytes`` of memory each.

    Raises:
        ConfigError: They do not fit the ranks (the shard degrees that do are named), or the model does not fit the devices.
    """
    if config.shard == "auto":
        room = int(device_bytes * config.state_fraction)
        shard = smallest_shard(
            state_bytes(model, config.optimizer_bytes), room, world=world, per_node=per_node
        )
    else:
        shard = per_node if config.shard == "node" else config.shard
    if world % shard:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        raise ConfigError(
            f"hybrid_sharding.shard: {shard} does not divide the {world} ranks of this job. "
            f"Shard degrees that do: {', '.join(map(str, divisors))}."
        )
    return world // shard, shard
