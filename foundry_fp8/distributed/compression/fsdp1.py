"""FSDP1 (``FullyShardedDataParallel``): its public communication hook, and the two seams that have no hook.

FULL_SHARD, SHARD_GRAD_OP and NO_SHARD use ``register_comm_hook``. The hybrid strategies refuse it, so there the hook is
set on each FSDP state (``_comm_hook``), where torch then leaves both legs to it. Parameters are gathered by
``FlatParamHandle._all_gather_flat_param``, which is bound anew on each handle. All of these are feature-tested here.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed import collectives
from foundry_fp8.distributed.agreement import check_all_to_all
from foundry_fp8.distributed.compressed_group import CompressedGroup
from foundry_fp8.distributed.compression.config import KEY
from foundry_fp8.distributed.compression.runtime import Compression, Row
from foundry_fp8.distributed.traffic import CountingGroup, reduce_options, scatter_options

__all__ = ["attach_fsdp1", "roots_of"]

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def roots_of(model: nn.Module) -> list[FullyShardedDataParallel]:
    """The outermost FSDP1 modules of ``model`` (Composer wraps the children of its model, not the model)."""
    if isinstance(model, FullyShardedDataParallel):
        return [model]
    return [root for child in model.children() for root in roots_of(child)]


def attach_fsdp1(model: nn.Module, compression: Compression) -> None:
    """Register the hooks on every FSDP1 state, and compress the gathering of parameters if asked to.

    Raises:
        ConfigError: The strategy cannot do what was asked.
        RuntimeError: A hook is registered already, or this torch has moved a seam.
    """
    config = compression.config
    replicates = all(s.sharding_strategy != ShardingStrategy.FULL_SHARD for _, s in _states(model))
    replicates &= all(s.sharding_strategy != ShardingStrategy.SHARD_GRAD_OP for _, s in _states(model))
    if not replicates and (config.gradients == "int4" or config.error_feedback is True):
        asked = "gradients: int4" if config.gradients == "int4" else "error_feedback: true"
        raise ConfigError(
            f"{KEY}.{asked} is for legs that replicate, and this FSDP only shards. Use int8 or e4m3 with "
            "error_feedback: auto, or sharding_strategy: HYBRID_SHARD."
        )
    for root in roots_of(model):
        root.check_is_root()  # forces FSDP1's lazy initialisation, which its own register_comm_hook needs too
    compression.replicates = replicates
    for name, state in _states(model):
        if not hasattr(state, "_comm_hook"):
            raise RuntimeError(
                f"{KEY}: torch {torch.__version__} has no FSDP1 hook where foundry_fp8 sets it."
            )
        if state._comm_hook is not None:
            raise RuntimeError(
                f"{KEY}: the FSDP1 module {name!r} has a communication hook already. Remove one."
            )
    for root in roots_of(model):
        states = _states(root)
        hybrid = any(state.sharding_strategy in HYBRID for _, state in states)
        hooks = {id(state): _hook_of(name, state, compression) for name, state in _states(model)}
        if hybrid:
            for _, state in states:
                state._comm_hook, state._comm_hook_state = hooks[id(state)], None
        else:
            root.register_comm_hook(None, hooks[id(states[0][1])])
            for (
                _,
                state,
            ) in states:  # registered once for all, where each unit has a group and a residual of its own
                state._comm_hook = hooks[id(state)]
        if config.parameters != "none":
            for name, state in states:
                if state._handle is not None:
                    _compress_gather(name, state, compression)


def _states(model: nn.Module) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]


def _reduced_numel(state: Any) -> int:
    """Elements that the replicate leg of a state reduces."""
    handle = state._handle
    if handle is None:
        return 0
    flat = handle.flat_param
    if state.sharding_strategy == ShardingStrategy.NO_SHARD:
        return flat.numel()
    total = flat._unpadded_unsharded_size.numel()
    return -(-total // state.world_size)


def _hook_of(name: str, state: Any, compression: Compression) -> Any:
    """The hook of one FSDP1 state: ``hook(None, grad, shard)``, or ``hook(None, grad)`` under NO_SHARD."""
    strategy = state.sharding_strategy
    sharded = strategy != ShardingStrategy.NO_SHARD
    shard = _group(state.process_group, name, state, compression, sharded=True) if sharded else None
    replicate = None
    if not sharded or strategy in HYBRID:
        group = state._inter_node_pg if sharded else state.process_group
        replicate = _group(group, name, state, compression, sharded=False)
    legs = [leg for leg in (shard, replicate) if leg is not None]
    action = next((leg.wire.name for leg in reversed(legs) if leg.wire is not None), "uncompressed")
    compression.rows.append(Row(name, "gradients", action, f"FSDP1 {strategy.name}"))

    def hook(_: Any, gradient: Tensor, new_shard: Tensor | None = None) -> None:
        compression.calls += 1
        reduced = gradient if new_shard is None else new_shard
        if shard is not None:
            shard._reduce_scatter_base(reduced, gradient.view(-1), scatter_options(dist.ReduceOp.AVG)).wait()
        if replicate is not None:
            replicate.allreduce([reduced], reduce_options(dist.ReduceOp.AVG)).wait()

    return hook


def _group(
    group: dist.ProcessGroup, name: str, state: Any, compression: Compression, *, sharded: bool
) -> CompressedGroup:
    config = compression.config
    route = compression.route(group)
    chosen = "int8" if sharded and config.gradients == "int4" else config.gradients
    wire = route.wire(config.wire(chosen))
    residual = None
    if wire is not None:
        check_all_to_all(group, _device_of(group))
        if not sharded and config.feeds_back:
            numel = route.residual_numel(_reduced_numel(state), wire)
            residual = compression.residual(name, numel, state.compute_device) if numel else None
    return CompressedGroup(
        group,
        compression.traffic,
        compression.switch,
        wire,
        second_leg=config.wire(config.second_leg),
        hop=route.hop,
        residual=residual,
    )


def _device_of(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _compress_gather(name: str, state: Any, compression: Compression) -> None:
    """Bind a compressing ``_all_gather_flat_param`` on the handle of one state."""
    handle, config = state._handle, compression.config
    wire = config.wire(config.parameters)
    assert wire is not None
    if not hasattr(handle, "_all_gather_flat_param"):
        raise RuntimeError(f"{KEY}.parameters: torch {torch.__version__} gathers FSDP1 parameters elsewhere.")
    nbytes = handle.flat_param._unpadded_unsharded_size.numel() * handle.flat_param.element_size()
    reason = None
    if state.sharding_strategy == ShardingStrategy.NO_SHARD:
        reason = "NO_SHARD gathers nothing"
    elif nbytes < config.min_bytes:
        reason = f"smaller than min_bytes ({config.min_bytes})"
    elif not compression.route(handle.process_group).compressed:
        reason = "all ranks of the shard group are on one node"
    compression.rows.append(
        Row(
            name,
            "parameters",
            "uncompressed" if reason else config.parameters,
            reason or "FSDP1 flat parameter",
        )
    )
    if reason:
        return
    _zero_padding(handle)
    group = CountingGroup(handle.process_group, compression.traffic)
    original, needs_unshard = handle._all_gather_flat_param, handle.needs_unshard
    rounded = False

    def gather(self: Any, padded: Tensor) -> Tensor:
        nonlocal rounded
        # Full precision was asked for: a state dict, summon_full_params or evaluation. What is saved is not rounded.
        if self._force_full_precision or not _computing(self):
            return original(padded)
        rounded = True
        shard = self.flat_param.data
        world = group.size()
        compression.traffic.count_logical(shard.nbytes * (world - 1))
        padded.copy_(collectives.all_gather(shard, group, wire).view_as(padded))
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


def _computing(handle: Any) -> bool:
    """Whether the handle unshards for a forward or backward pass, as opposed to a summon of full parameters."""
    return handle._training_state.name != "SUMMON_FULL_PARAMS"


def _zero_padding(handle: Any) -> None:
    """Zero the alignment padding in the local shard: FSDP1 fills it with 42, which would set the scale of its block."""
    flat = handle.flat_param
    inside = torch.cat(
        [
            torch.full((numel,), is_padding)
            for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True)
        ]
    )
    size = flat.numel()
    start = handle.rank * size
    mine = torch.nn.functional.pad(inside, (0, max(0, start + size - inside.numel())))[start : start + size]
    with torch.no_grad():
        flat.data[mine.to(flat.device)] = 0
