"""What FSDP1's units hold, and over which ranks they reduce: ``FlatParamHandle`` and the state of ``FullyShardedDataParallel``.

Cause: FSDP1 has no public way to the parameters in its flat parameter nor to its groups
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_flat_param.py, ``FlatParameter``;
``_init_utils.py``, ``_init_process_group_state_for_hybrid_shard``). FSDP1 is deprecated and its names have not moved from torch 2.1 to
2.11. Remove with FSDP1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

__all__ = ["HYBRID", "FlatPart", "flat_parts", "lost_replicas", "replica_group"]

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_NAMES = ("_numels_with_padding", "_is_padding_mask", "_shapes", "_param_infos")


@dataclasses.dataclass(frozen=True)
class FlatPart:
    """A run of elements of a flat parameter: one parameter, or padding."""

    numel: int
    shape: tuple[int, ...] | None
    """``None`` for padding."""
    module: nn.Module | None
    """Whose parameter it is."""


def flat_parts(unit: FullyShardedDataParallel) -> list[FlatPart]:
    """What the flat parameter of ``unit`` is made of, in order; nothing where it manages no parameter.

    Raises:
        RuntimeError: This torch keeps it elsewhere.
    """
    handle: Any = unit._handle
    if handle is None:
        return []
    flat = handle.flat_param
    missing = [name for name in _NAMES if not hasattr(flat, name)]
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} no longer has {', '.join(missing)} on FSDP1's flat parameter. Install a torch from 2.7 to "
            "2.11, or adapt foundry_fp8/compat/fsdp1.py."
        )
    parameters = zip(flat._shapes, flat._param_infos, strict=True)
    parts = []
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        shape, info = (None, None) if is_padding else next(parameters)
        parts.append(
            FlatPart(numel, None if shape is None else tuple(shape), None if info is None else info.module)
        )
    return parts


def replica_group(unit: FullyShardedDataParallel) -> dist.ProcessGroup | None:
    """The ranks that must hold the same elements of ``unit``; ``None`` where it only shards."""
    if unit.sharding_strategy in HYBRID or lost_replicas(unit):
        return unit._inter_node_pg
    return unit.process_group if unit.sharding_strategy == ShardingStrategy.NO_SHARD else None


def lost_replicas(unit: FullyShardedDataParallel) -> bool:
    """Whether torch clamped a hybrid strategy with a shard group of one rank to NO_SHARD over that group.

    Such a unit reduces its gradients over one rank: its replicas drift apart, and nothing says so.
    """
    return (
        unit.sharding_strategy == ShardingStrategy.NO_SHARD
        and getattr(unit, "_inter_node_pg", None) is not None
    )
