"""Whether the parameters behind FSDP2's unsharded weights were written since one last looked.

Cause: FSDP2 gathers into the same memory every time and keeps the version counter of what it gathers into, so neither the
address nor the counter of an unsharded weight tells of a write to its shard
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``init_unsharded_param``).
The counters of the shards do; torch has no public way to them while a unit is unsharded. Remove when it has.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

__all__ = ["shard_versions"]


def shard_versions(model: nn.Module) -> tuple[int, ...]:
    """Identity and version of every shard of the FSDP2 units in ``model`` (itself included); empty without FSDP2."""
    if not dist.is_available():
        return ()
    from torch.distributed.fsdp import FSDPModule

    found: list[int] = []
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        for param in () if group is None else group.fsdp_params:
            shard: Any = param.sharded_param
            found += [id(shard), shard._version, shard._local_tensor._version]
    return tuple(found)
