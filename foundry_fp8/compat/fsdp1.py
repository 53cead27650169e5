"""What FSDP1's units hold, how they gather it, and over which ranks and by which hook they reduce.

Cause: FSDP1 has no public way to the parameters in its flat parameter, to its gathers, nor to its groups; and its
``register_comm_hook`` refuses the hybrid strategies, whose two legs torch leaves to a hook that is there all the same
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_flat_param.py, ``FlatParameter``;
``_init_utils.py``, ``_init_process_group_state_for_hybrid_shard``). FSDP1 is deprecated and its names have not moved from torch 2.1 to
2.11. Remove with FSDP1.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, _common_utils, _runtime_utils

from foundry_fp8.config.versions import moved

__all__ = [
    "HYBRID", "FlatPart", "abandon_pass", "dropped_replication", "flat_parameter", "flat_parts", "has_hook",
    "is_flattened", "replace_gather", "replica_group", "set_hooks", "whole_shapes",
]  # fmt: skip

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
    _check(flat, _NAMES)
    parameters = zip(flat._shapes, flat._param_infos, strict=True)
    parts = []
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        shape, info = (None, None) if is_padding else next(parameters)
        parts.append(
            FlatPart(numel, None if shape is None else tuple(shape), None if info is None else info.module)
        )
    return parts


def flat_parameter(unit: FullyShardedDataParallel) -> Tensor | None:
    """The flat parameter of ``unit``; ``None`` where it manages none."""
    handle: Any = unit._handle
    return None if handle is None else handle.flat_param


def whole_shapes(model: nn.Module) -> dict[Tensor, torch.Size]:
    """The shape that each parameter of the FSDP1 units in ``model`` had before it was flattened and cut.

    Raises:
        RuntimeError: This torch keeps it elsewhere.
    """
    found: dict[Tensor, torch.Size] = {}
    for unit in model.modules():
        flat: Any = flat_parameter(unit) if isinstance(unit, FullyShardedDataParallel) else None
        if flat is not None:
            _check(flat, ("_params", "_shapes"))
            found.update(zip(flat._params or (), flat._shapes, strict=False))
    return found


def is_flattened(parameter: Tensor) -> bool:
    """Whether ``parameter`` is a flat parameter, or one of those that FSDP1 made a view into one.

    Raises:
        RuntimeError: This torch marks them in another way.
    """
    _check(_common_utils, ("_is_fsdp_flattened",))
    return bool(_common_utils._is_fsdp_flattened(parameter))


def has_hook(unit: FullyShardedDataParallel) -> bool:
    """Whether somebody has given ``unit`` a communication hook.

    Raises:
        RuntimeError: This torch keeps it elsewhere.
    """
    _check(unit, ("_comm_hook", "_comm_hook_state", "_handle"))
    return unit._comm_hook is not None


def set_hooks(
    root: FullyShardedDataParallel,
    units: Sequence[FullyShardedDataParallel],
    hooks: Sequence[Callable[..., None]],
) -> None:
    """Give each of the units under ``root``, itself included, a hook of its own: ``hook(state, gradient[, shard])``, state ``None``.

    The public registration, where there is one, takes one hook for all.
    """
    if not any(unit.sharding_strategy in HYBRID for unit in units):
        root.register_comm_hook(None, hooks[0])  # type: ignore[arg-type]
    for unit, hook in zip(units, hooks, strict=True):
        unit._comm_hook, unit._comm_hook_state = hook, None


def replace_gather(unit: FullyShardedDataParallel, gather: Callable[[Tensor, bool], Tensor | None]) -> None:
    """Have the gathers for a forward or backward pass made by ``gather``; what is gathered to be saved or read stays torch's.

    Args:
        unit: Not under NO_SHARD, which gathers nothing.
        gather: Takes this rank's shard, and whether full precision was asked for (evaluation, by FSDP1's own switch). Returns all ranks'
            shards, rounded perhaps, or ``None`` to leave it to torch.

    Raises:
        RuntimeError: This torch gathers elsewhere.
    """
    handle: Any = unit._handle
    _check(
        handle, ("_all_gather_flat_param", "needs_unshard", "_free_unsharded_flat_param", "_training_state")
    )
    original, needs_unshard = handle._all_gather_flat_param, handle.needs_unshard
    rounded = False

    def all_gather_flat_param(self: Any, padded: Tensor) -> Tensor:
        nonlocal rounded
        values = gather(self.flat_param.data, self._force_full_precision) if _computing(self) else None
        if values is None:
            return original(padded)
        rounded = True
        return padded.copy_(values.view_as(padded))

    def needs_exact(self: Any) -> bool:
        # The root stays gathered after its forward. A state dict taken then would hold the rounded copy: free it.
        nonlocal rounded
        if rounded and not _computing(self) and not needs_unshard():
            self._free_unsharded_flat_param()
            rounded = False
        return needs_unshard()

    handle._all_gather_flat_param = types.MethodType(all_gather_flat_param, handle)
    handle.needs_unshard = types.MethodType(needs_exact, handle)


def abandon_pass(model: nn.Module) -> None:
    """After a forward or backward that raised: the next one finds FSDP1 as after one that ended, and nothing of its gradients."""
    for unit in model.modules():
        if isinstance(unit, FullyShardedDataParallel):
            unit.training_state = _common_utils.TrainingState.IDLE
            if unit._is_root:
                with unit.no_sync():
                    _runtime_utils._post_backward_final_callback(unit, unit)
            if (flat := flat_parameter(unit)) is not None:
                flat.grad = None
                vars(flat).pop("_saved_grad_shard", None)


def _computing(handle: Any) -> bool:
    """Whether the handle unshards for a forward or backward pass, as opposed to a summon of full parameters."""
    return handle._training_state.name != "SUMMON_FULL_PARAMS"


def replica_group(unit: FullyShardedDataParallel) -> dist.ProcessGroup | None:
    """The ranks that must hold the same elements of ``unit``; ``None`` where it only shards."""
    if unit.sharding_strategy in HYBRID or dropped_replication(unit):
        return unit._inter_node_pg
    return unit.process_group if unit.sharding_strategy == ShardingStrategy.NO_SHARD else None


def dropped_replication(unit: FullyShardedDataParallel) -> bool:
    """Whether torch clamped a hybrid strategy with a shard group of one rank to NO_SHARD over that group.

    Such a unit reduces its gradients over one rank: its replicas drift apart, and nothing says so.
    """
    return (
        unit.sharding_strategy == ShardingStrategy.NO_SHARD
        and getattr(unit, "_inter_node_pg", None) is not None
    )


def _check(found: Any, names: Sequence[str]) -> None:
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        raise moved(f"no longer has {', '.join(missing)} on FSDP1's {type(found).__name__}", "fsdp1")
