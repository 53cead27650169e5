"""For workers: what a trace of the first forward sees of a sharded model."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.surgery.apply import apply_fp8
from foundry_fp8.surgery.first_batch import ForwardTrace, as_run


class Block(nn.Module):
    """Multiplies by ``down``'s weight without calling it, and by experts in one parameter."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.experts = nn.Parameter(torch.randn(2, 32, 32) / 8)
        self.shift = nn.Parameter(torch.zeros(4, 32))

    def forward(self, x):
        x = F.linear(self.up(x).relu(), self.down.weight) @ self.experts[0] @ self.experts[1]
        return x + self.shift


def what_ran(kind):
    """``{row: (action, precision)}`` and the warnings, after one step under the wrapper ``kind``."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    report = apply_fp8(model, recipe="current")
    trace, wrapped = ForwardTrace(model), model
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    elif kind == "fsdp1":
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    elif kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trace.arm()
    wrapped(torch.randn(4, 32)).square().mean().backward()
    ran, warnings = as_run(report, trace)
    dist.barrier()  # and no destroy_process_group: ranks.py says why
    return {row.name: (row.action, row.precision) for row in ran.rows}, warnings
