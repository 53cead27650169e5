"""A check that replicas are replicas: the bits of every parameter, compared across the ranks that must hold the same.

What makes replicas drift apart (a reduction that did not run, different seeds, a rank that loaded another checkpoint) shows in no
loss curve, and a checkpoint keeps one of them. Here every rank takes a checksum of each of its parameters, and two small all-reduces
compare them: when something attaches, and after the first optimizer step, which follows the first reduction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.compat.fsdp1 import replica_group
from foundry_fp8.distributed.attendance import Attendance
from foundry_fp8.distributed.mesh import collective_device
from foundry_fp8.model_structure.names import clean_name

__all__ = ["check_replicas", "fingerprint", "replicated_parameters"]

CHUNK = 1 << 20
"""Elements summed at a time: 8 MiB of temporaries."""
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 over the golden ratio: odd and without a pattern, as a signed number."""
SHOWN = 5
"""Parameters named in the error."""


def check_replicas(model: nn.Module, key: str) -> int:
    """Raise on every rank unless all copies of every parameter hold the same bits. Every rank must call it.

    Args:
        model: Wrapped by DDP, FSDP1 or FSDP2. What only shards has no copies and is not looked at.
        key: The YAML key of what asks, for the message.

    Returns:
        How many parameters, or shards of them, this rank compared.

    Raises:
        RuntimeError: Copies differ; the first parameters are named.
    """
    by_group: dict[dist.ProcessGroup, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, local, group in replicated_parameters(model):
        by_group[group].append((name, local))
    attendance = Attendance(f"{key}.check_replicas")
    attendance.say()
    different: list[str] = []
    for group, parameters in by_group.items():
        device = collective_device(group)
        mine = torch.stack([fingerprint(local).to(device) for _, local in parameters])
        least, most = mine.clone(), mine.clone()
        attendance.all_reduce(least, dist.ReduceOp.MIN, group)
        attendance.all_reduce(most, dist.ReduceOp.MAX, group)
        same = (least == most).tolist()
        different += [name for (name, _), alike in zip(parameters, same, strict=True) if not alike]
    anywhere = torch.tensor([len(different)], dtype=torch.int64, device=collective_device())
    # So that no rank goes on and waits for those that raise.
    attendance.all_reduce(anywhere, dist.ReduceOp.MAX)
    if anywhere.item():
        shown = ", ".join(different[:SHOWN]) or "parameters of other ranks"
        more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        raise RuntimeError(
            f"{key}: {shown}{more} differ between replicas, which must hold the same bits. Their gradients are not reduced across "
            "all replicas, or they started from different seeds or checkpoints. Nothing trained so is one model: mend that and start "
            f"from an earlier checkpoint, or set {key}.check_replicas: false to train on regardless."
        )
    return sum(map(len, by_group.values()))


def replicated_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, dist.ProcessGroup]]:
    """``(name, this rank's elements, the ranks that hold the same elements)`` of every parameter that has copies."""
    if isinstance(model, DistributedDataParallel):
        for name, parameter in model.module.named_parameters():
            if name not in model.parameters_to_ignore:
                yield name, parameter.detach(), model.process_group
        return
    for name, parameter, unit in _parameters_with_unit(model):
        local = parameter.detach()
        if isinstance(local, DTensor):
            mesh = local.device_mesh
            for dim, placement in enumerate(local.placements):
                if isinstance(placement, Replicate) and mesh.size(dim) > 1:
                    yield name, local.to_local(), mesh.get_group(dim)
        elif unit is not None:
            group = replica_group(unit)
            if group is not None and group.size() > 1:
                yield name, local, group


def fingerprint(tensor: Tensor) -> Tensor:
    """An int64 of the bits of ``tensor``: the sum of its words, each with a weight that depends on its place.

    Differences that cancel in a plain sum (one bit up here and down there, exchanged elements) show in this one. It is
    computed where ``tensor`` lives, without waiting for it.
    """
    words = tensor.contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if not words.numel():
        return total
    words = words.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[words.element_size()])
    weights = torch.arange(1, min(CHUNK, words.numel()) + 1, device=words.device).mul_(FACTOR)
    weights = (weights ^ (weights >> 29)).mul_(FACTOR).bitwise_or_(1)
    for chunk in words.split(CHUNK):
        total = total * FACTOR + (chunk * weights[: chunk.numel()]).sum()
    return total


def _parameters_with_unit(
    module: nn.Module, prefix: str = "", unit: FullyShardedDataParallel | None = None
) -> Iterator[tuple[str, Tensor, FullyShardedDataParallel | None]]:
    """Every parameter with its clean name and the FSDP1 module that manages it."""
    unit = module if isinstance(module, FullyShardedDataParallel) else unit
    for name, parameter in module.named_parameters(recurse=False):
        yield clean_name(prefix + name), parameter, unit
    for name, child in module.named_children():
        yield from _parameters_with_unit(child, f"{prefix}{name}.", unit)
