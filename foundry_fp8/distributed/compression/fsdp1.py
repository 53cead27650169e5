"""FSDP1 (``FullyShardedDataParallel``): its public communication hook, and the two seams that have no hook.

FULL_SHARD, SHARD_GRAD_OP and NO_SHARD use ``register_comm_hook``. The hybrid strategies refuse it, so there the hook is
set on each FSDP state (``_comm_hook``), where torch then leaves both legs to it. Parameters are gathered by
``FlatParamHandle._all_gather_flat_param``, which is bound anew on each handle: to count what it sends, and to compress it. All of these
are feature-tested here.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from foundry_fp8.compat.fsdp1 import HYBRID, flat_parts, lost_replicas, replica_group
from foundry_fp8.config import ConfigError
from foundry_fp8.distributed import collectives
from foundry_fp8.distributed.compressed_group import CompressedGroup
from foundry_fp8.distributed.compression.config import KEY
from foundry_fp8.distributed.compression.legs import check_legs, replicate_leg, shard_leg
from foundry_fp8.distributed.compression.runtime import Compression, ReportRow
from foundry_fp8.distributed.rows import Row
from foundry_fp8.distributed.traffic import CountingGroup, reduce_options, scatter_options

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
    check_legs(compression, shards=strategies != {ShardingStrategy.NO_SHARD}, replicates=not only_shard)
    for root in roots_of(model):
        root.check_is_root()  # forces FSDP1's lazy initialisation, which its own register_comm_hook needs too
    for name, state in _states(model):
        _check_state(name, state)
    for root in roots_of(model):
        states = _states(root)
        hybrid = any(state.sharding_strategy in HYBRID for _, state in states)
        hooks = {id(state): _hook_of(name, state, compression) for name, state in states}
        if hybrid:
            for _, state in states:
                state._comm_hook, state._comm_hook_state = hooks[id(state)], None
        else:
            root.register_comm_hook(None, hooks[id(states[0][1])])
            for (
                _,
                state,
            ) in states:  # registered once for all, where each unit has groups and a residual of its own
                state._comm_hook = hooks[id(state)]
        for name, state in states:
            if state._handle is not None:
                _bind_gather(name, state, compression)


def _states(model: nn.Module) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]


def _check_state(name: str, state: Any) -> None:
    if not hasattr(state, "_comm_hook"):
        raise RuntimeError(f"{KEY}: torch {torch.__version__} has no FSDP1 hook where foundry_fp8 sets it.")
    if state._comm_hook is not None:
        raise RuntimeError(f"{KEY}: the FSDP1 module {name!r} has a communication hook already. Remove one.")
    if lost_replicas(state):
        raise ConfigError(
            f"{KEY}: the FSDP1 module {name!r} was wrapped with a hybrid strategy over shard groups of one rank. torch runs that as "
            "NO_SHARD over the one rank, and its gradients are never reduced. Use sharding_strategy: NO_SHARD, or "
            "algorithms.hybrid_sharding, which does."
        )


def _rows_of(state: Any, is_exact: Callable[[Any], bool], block_size: int) -> list[Row]:
    """What each rank's shard of a unit's flat parameter is made of; one row for all of it under NO_SHARD.

    A shard ends anywhere, inside of a parameter as a rule.
    """
    parts = flat_parts(state)
    numel = sum(part.numel for part in parts)
    ranks = 1 if state.sharding_strategy == ShardingStrategy.NO_SHARD else state.world_size
    each = -(-numel // ranks)
    sections = [(part.numel, part.shape is None or is_exact(part)) for part in parts]
    whole = Row((*sections, (each * ranks - numel, True)))
    return [Row.join(whole.cut(each * rank, each * (rank + 1)), block_size) for rank in range(ranks)]


def _hook_of(name: str, state: Any, compression: Compression) -> Callable[..., None]:
    """The hook of one FSDP1 state: ``hook(None, grad, shard)``, or ``hook(None, grad)`` under NO_SHARD."""
    config = compression.config
    shard = replicate = None
    if state._handle is not None:
        flat, device = state._handle.flat_param, state.compute_device
        itemsize = flat.element_size()

        def is_exact(part: Any) -> bool:
            return config.why_exact(part.shape, itemsize) is not None

        rows = _rows_of(state, is_exact, config.block_size)
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
            shard._reduce_scatter_base(reduced, gradient.view(-1), scatter_options(dist.ReduceOp.AVG)).wait()
        if replicate is not None:
            replicate.allreduce([reduced], reduce_options(dist.ReduceOp.AVG)).wait()

    return hook


def _bind_gather(name: str, state: Any, compression: Compression) -> None:
    """Bind a counting, and perhaps compressing, ``_all_gather_flat_param`` on the handle of one state."""
    handle, traffic = state._handle, compression.traffic
    if state.sharding_strategy == ShardingStrategy.NO_SHARD:
        if compression.config.parameters != "none":
            compression.rows.append(ReportRow(name, "parameters", "uncompressed", "NO_SHARD gathers nothing"))
        return
    if not hasattr(handle, "_all_gather_flat_param"):
        raise RuntimeError(f"{KEY}: torch {torch.__version__} gathers FSDP1 parameters elsewhere.")
    compressed = _compressed_gather(name, state, compression)
    original, needs_unshard = handle._all_gather_flat_param, handle.needs_unshard
    others = state.world_size - 1
    rounded = False

    def gather(self: Any, padded: Tensor) -> Tensor:
        nonlocal rounded
        if not _computing(self):  # a state dict or summon_full_params; what is saved is not rounded
            return original(padded)
        shard = self.flat_param.data
        # Evaluation in full precision was asked for by FSDP's own switch: not rounded either.
        codes = None if self._force_full_precision else compressed
        traffic.count_logical(shard.nbytes * others, compressed=codes is not None)
        if codes is None:
            traffic.count("all_gather", shard.nbytes * others)
            return original(padded)
        rounded = True
        padded.copy_(codes(shard).view_as(padded))
        return padded

    def needs_exact(self: Any) -> bool:
        # The root stays gathered after its forward. A state dict taken then would hold the rounded copy: free it.
        nonlocal rounded
        if rounded and not _computing(self) and not needs_unshard():
            self._free_unsharded_flat_param()
            rounded = False
        return needs_unshard()

    handle._all_gather_flat_param = types.MethodType(gather, handle)
    handle.needs_unshard = types.MethodType(needs_exact, handle)


def _compressed_gather(name: str, state: Any, compression: Compression) -> Callable[[Tensor], Tensor] | None:
    """The gather of a shard as codes, if parameters are compressed in this unit; adds its line to the report."""
    config, handle = compression.config, state._handle
    wire = config.wire(config.parameters)
    if wire is None:
        return None
    itemsize = handle.flat_param.element_size()

    def is_exact(part: Any) -> bool:
        return isinstance(part.module, nn.Embedding) or config.why_exact(part.shape, itemsize) is not None

    rows = _rows_of(state, is_exact, config.block_size)
    reason = compression.path(handle.process_group).why_not
    if not reason and sum(row.numel for row in rows) * itemsize < config.min_bytes:
        reason = f"smaller than min_bytes ({config.min_bytes})"
    if not reason and not any(row.coded for row in rows):
        reason = "no matrix, or embeddings alone"
    action = "uncompressed" if reason else config.parameters
    what = "FSDP1 flat parameter, embeddings, vectors and small parameters exactly"
    compression.rows.append(ReportRow(name, "parameters", action, reason or what))
    if reason:
        return None
    group = CountingGroup(handle.process_group, compression.traffic)
    return lambda shard: collectives.all_gather(shard, group, wire, rows=rows)


def _computing(handle: Any) -> bool:
    """Whether the handle unshards for a forward or backward pass, as opposed to a summon of full parameters."""
    return handle._training_state.name != "SUMMON_FULL_PARAMS"
