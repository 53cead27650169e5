"""Process groups with the job's timeout, where torch's ``new_group`` has a default, and HSDP's meshes of them: shard in groups of ranks,
replicate across them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from foundry_fp8.compat import cpu_stream_events
from foundry_fp8.compat.process_group import group_timeout
from foundry_fp8.config import ConfigError

__all__ = [
    "alone", "collective_device", "hybrid_mesh", "make_group", "ranks_per_node", "smallest_shard",
]  # fmt: skip

REPLICATE, SHARD = "dp_replicate", "dp_shard"


def alone() -> bool:
    """Whether this job has one rank."""
    return not dist.is_initialized() or dist.get_world_size() < 2


def make_group(ranks: Sequence[int], like: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """A new group of ``ranks`` with the timeout of ``like`` (of the job where ``None``). All of these ranks call it, and no others."""
    return dist.new_group(list(ranks), timeout=group_timeout(like), use_local_synchronization=True)


def collective_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must live to be reduced over ``group`` (the job's where ``None``)."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def ranks_per_node() -> int:
    """Ranks on this node, as the launcher says (``LOCAL_WORLD_SIZE``); all ranks where it says nothing."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def smallest_shard(state_bytes: int, device_bytes: int, *, world: int, per_node: int) -> int:
    """The smallest shard degree whose share of the model's state fits a device.

    Whole nodes are preferred from one node up, since a group that ends inside a node sends its gathers over the
    network anyway.

    Raises:
        ConfigError: Not even all ranks together hold it.
    """
    degrees = [n for n in range(1, world + 1) if world % n == 0 and (n % per_node == 0 or per_node % n == 0)]
    for degree in degrees:
        if state_bytes <= degree * device_bytes:
            return degree
    raise ConfigError(
        f"hybrid_sharding.shard: auto: the model's state of {state_bytes / 2**30:.1f} GiB does not fit {world} "
        f"devices with {device_bytes / 2**30:.1f} GiB each for it. Use more devices or a smaller model."
    )


def hybrid_mesh(
    device_type: str, replicate: int, shard: int, names: tuple[str, str] = (REPLICATE, SHARD)
) -> DeviceMesh:
    """The 2-D mesh ``[replicate, shard]``: consecutive ranks shard. Every rank must call it.

    Its groups have the job's time limit; those that ``init_device_mesh`` makes have torch's default. On a CPU it also gives native HSDP what
    it needs there (``compat/cpu_stream_events.py``).
    """
    if device_type == "cpu":
        cpu_stream_events.apply()
    ranks = torch.arange(replicate * shard, device="cpu").view(replicate, shard)
    row, column = divmod(dist.get_rank(), shard)
    groups = [make_group(ranks[:, column].tolist()), make_group(ranks[row].tolist())]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
