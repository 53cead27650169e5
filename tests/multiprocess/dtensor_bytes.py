"""For a worker: what a step over DTensors holds, counted twice, and by the allocator's own record."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from foundry_fp8.planning.memory.live_bytes import LiveBytes
from tests.allocations import most_allocated


def counted_and_allocated():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    x, w = (distribute_tensor(torch.randn(256, 256), mesh) for _ in range(2))
    layer = nn.Sequential(nn.GELU(), nn.SiLU())

    def step():
        return layer(x @ w).sum()

    found = []
    for _ in range(2):  # the first time DTensor runs operators on fakes too
        with LiveBytes() as meter:
            step()
        found.append(meter.peak)
    return *found, most_allocated(step)
