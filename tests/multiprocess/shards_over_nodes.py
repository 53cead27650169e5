"""A hybrid mesh whose shard groups span nodes and are not all ranks: its gradients take two hops within each group."""

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import foundry_fp8
from foundry_fp8.compat import cpu_stream_events
from tests.multiprocess.newer_fsdp2 import built, exact, gradients


def trained(shard, changes):
    """``(largest relative error of a gradient, rows of the report)`` with copies of ``shard`` ranks."""
    dist.init_process_group("gloo")
    expected, model = exact(), built()
    cpu_stream_events.apply()
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // shard, shard), mesh_dim_names=("copies", "shards")
    )
    for layer in model:
        fully_shard(layer, mesh=mesh)
    torch.manual_seed(0)
    found = foundry_fp8.apply_compressed_communication(model, min_bytes=0, warmup=0, adapt=False, **changes)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients(model), expected, strict=True))
    return error, [dataclasses.asdict(row) for row in found.rows]
