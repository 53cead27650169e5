"""FSDP1 (``FullyShardedDataParallel``): its communication hook and its gathers.

Each unit has a hook of its own, in the hybrid strategies for both legs; and its gathers are replaced, to count what they send and to
compress it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from foundry_fp8.compat.fsdp1 import (
    FlatPart,
    dropped_replication,
    flat_parameter,
    flat_parts,
    has_hook,
    replace_gather,
    replica_group,
    set_hooks,
)
from foundry_fp8.config import refuse
from foundry_fp8.distributed import collectives
from foundry_fp8.distributed.compressed_group import CompressedGroup
from foundry_fp8.distributed.compression.config import KEY, CompressionConfig
from foundry_fp8.distributed.compression.legs import LEG_CLASHES, Legs, replicate_leg, shard_leg
from foundry_fp8.distributed.compression.runtime import Compression
from foundry_fp8.distributed.rows import Row
from foundry_fp8.distributed.traffic import CountingGroup, reduce_options

__all__ = ["attach_fsdp1", "roots_of"]


def roots_of(model: nn.Module) -> list[FullyShardedDataParallel]:
    """The outermost FSDP1 modules of ``model`` (Composer wraps the children of its model, not the model)."""
    if isinstance(model, FullyShardedDataParallel):
        return [model]
    return [root for child in model.children() for root in roots_of(child)]


def attach_fsdp1(model: nn.Module, compression: Compression) -> None:
    """Register the hooks on every FSDP1 state, count the gathers, and compress them if asked to.

    Raises:
        ConfigError: The strategy cannot do what was asked.
        RuntimeError: A hook is registered already, or this torch has moved a seam.
    """
    strategies = {state.sharding_strategy for _, state in _states(model)}
    only_shard = strategies & {ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP}
    legs = Legs(
        config=compression.config,
        shards=strategies != {ShardingStrategy.NO_SHARD},
        replicates=not only_shard,
        drops_replication=any(dropped_replication(state) for _, state in _states(model)),
    )
    refuse(LEG_CLASHES, legs)
    for root in roots_of(model):
        root.check_is_root()  # forces FSDP1's lazy initialisation, which its own register_comm_hook needs too
    for name, state in _states(model):
        if has_hook(state):
            raise RuntimeError(
                f"{KEY}: the FSDP1 module {name!r} has a communication hook already. Remove one."
            )
    for root in roots_of(model):
        states = _states(root)
        # Each unit has groups and a residual of its own.
        hooks = [_hook_of(name, state, compression) for name, state in states]
        set_hooks(root, [state for _, state in states], hooks)
        for name, state in states:
            if flat_parameter(state) is not None:
                _bind_gather(name, state, compression)


def _states(model: nn.Module) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]


def _rows_of(state: Any, flat: Tensor, config: CompressionConfig, *, embeddings: bool) -> list[Row]:
    """What each rank's shard of a unit's flat parameter is made of; one row for all of it under NO_SHARD.

    A shard ends anywhere, inside of a parameter as a rule. ``embeddings``: whether those are coded as other matrices are.
    """

    def is_exact(part: FlatPart) -> bool:
        if part.shape is None or (isinstance(part.module, nn.Embedding) and not embeddings):
            return True
        return config.why_exact(part.shape, flat.element_size()) is not None

    parts = flat_parts(state)
    numel = sum(part.numel for part in parts)
    ranks = 1 if state.sharding_strategy == ShardingStrategy.NO_SHARD else state.world_size
    each = -(-numel // ranks)
    sections = [(part.numel, is_exact(part)) for part in parts]
    whole = Row((*sections, (each * ranks - numel, True)))
    return [Row.join(whole.cut(each * rank, each * (rank + 1)), config.block_size) for rank in range(ranks)]


def _hook_of(name: str, state: Any, compression: Compression) -> Callable[..., None]:
    """The hook of one FSDP1 state: ``hook(None, grad, shard)``, or ``hook(None, grad)`` under NO_SHARD."""
    config = compression.config
    shard = replicate = None
    flat = flat_parameter(state)
    if flat is not None:
        device = state.compute_device
        itemsize = flat.element_size()
        rows = _rows_of(state, flat, config, embeddings=True)
        numel, total = rows[0].numel, sum(row.numel for row in rows)
        if len(rows) > 1:
            leg = shard_leg(
                compression,
                state.process_group,
                lambda count: rows if count == total else None,
                name=name,
                device=device,
                nbytes=total * itemsize,
            )
            shard = CompressedGroup(state.process_group, compression.traffic, compression.switch, leg)
        group = replica_group(state)
        if group is not None:
            own = rows[state.process_group.rank() if len(rows) > 1 else 0]
            leg = replicate_leg(
                compression,
                group,
                lambda count: own if count == own.numel else None,
                name=name,
                device=device,
                numel=numel,
                nbytes=numel * itemsize,
            )
            replicate = CompressedGroup(group, compression.traffic, compression.switch, leg)

    def hook(_: Any, gradient: Tensor, new_shard: Tensor | None = None) -> None:
        reduced = gradient if new_shard is None else new_shard
        if shard is not None:
            options = reduce_options(dist.ReduceOp.AVG, dist.ReduceScatterOptions)
            shard._reduce_scatter_base(reduced, gradient.view(-1), options).wait()
        if replicate is not None:
            replicate.allreduce([reduced], reduce_options(dist.ReduceOp.AVG)).wait()

    return hook


def _bind_gather(name: str, state: Any, compression: Compression) -> None:
    """Count what the unit gathers, and compress it if asked to."""
    traffic = compression.traffic
    if state.sharding_strategy == ShardingStrategy.NO_SHARD:
        if compression.config.parameters != "none":
            compression.note(name, "parameters", "", "", "NO_SHARD gathers nothing")
        return
    compressed = _compressed_gather(name, state, compression)
    others = state.world_size - 1

    def gather(shard: Tensor, full_precision: bool) -> Tensor | None:
        codes = None if full_precision else compressed
        traffic.count_logical(shard.nbytes * others)
        if codes is not None:
            return codes(shard)
        traffic.count("all_gather", shard.nbytes * others)
        return None

    replace_gather(state, gather)


def _compressed_gather(name: str, state: Any, compression: Compression) -> Callable[[Tensor], Tensor] | None:
    """The gather of a shard as codes, if parameters are compressed in this unit; adds its line to the report."""
    config, flat = compression.config, flat_parameter(state)
    wire = config.wire(config.parameters)
    if wire is None or flat is None:
        return None
    rows = _rows_of(state, flat, config, embeddings=False)
    reason = compression.path(state.process_group).why_not
    if not reason and sum(row.numel for row in rows) * flat.element_size() < config.min_bytes:
        reason = f"smaller than min_bytes ({config.min_bytes})"
    if not reason and not any(row.coded for row in rows):
        reason = "no matrix, or embeddings alone"
    how = "FSDP1 flat parameter, embeddings, vectors and small parameters exactly"
    compression.note(name, "parameters", config.parameters, how, reason)
    if reason:
        return None
    group = CountingGroup(state.process_group, compression.traffic)
    return lambda shard: collectives.all_gather(shard, group, wire, rows=rows)
