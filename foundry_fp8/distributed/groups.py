"""New process groups with the job's timeout, and the device that their tensors must be on.

``torch.distributed.new_group`` uses torch's default timeout (30 minutes on gloo, 10 on NCCL), not the job's. When a rank hangs, the job's own
collectives would fail after the job's timeout and those of this package much later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from foundry_fp8.compat.group_timeout import group_timeout

__all__ = ["alone", "collective_device", "make_group"]


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
