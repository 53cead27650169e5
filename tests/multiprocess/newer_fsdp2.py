"""What FSDP2 learnt after torch 2.11: a group of its own for the reduce-scatter, and one module with parameters on two meshes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import foundry_fp8
from foundry_fp8.compat import cpu_stream_events
from foundry_fp8.compat.fsdp2 import units_of
from foundry_fp8.distributed.traffic import CountingGroup, average_on_gloo


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def gradients(model):
    torch.manual_seed(10 + dist.get_rank())
    model(torch.randn(32, 64)).square().mean().backward()
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad
        found.append(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)
    return found


def exact():
    """Of a plain model on the mean over ranks."""
    found = gradients(built())
    for gradient in found:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return found


def separate_group(compress):
    """``(largest error of a gradient, bytes that our groups counted, units)``."""
    dist.init_process_group("gloo")
    expected, model = exact(), built()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.set_separate_reduce_scatter_group(True)
    return _run(model, compress, expected)


def two_meshes(compress):
    """Weights sharded over both ranks, biases replicated on them."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )
    from torch.distributed.tensor import Shard

    dist.init_process_group("gloo")
    expected, model = exact(), built()
    mesh = init_device_mesh("cpu", (2,))
    cpu_stream_events.apply()
    copies = HSDPMeshInfo(
        init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")),
        shard_mesh_dim=1,
        replicate_mesh_dim=0,
    )
    whole = FSDPMeshInfo(mesh, shard_mesh_dim=0)

    def placement(parameter):
        return ShardPlacementResult(placement=Shard(0), mesh_info=whole if parameter.dim() == 2 else copies)

    fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    return _run(model, compress, expected)


def _run(model, compress, expected):
    if compress:
        foundry_fp8.apply_compressed_communication(
            model, gradients="int8", min_bytes=0, warmup=0, adapt=False, scope="all"
        )
    else:
        average_on_gloo(model)
    units = units_of(model)
    assert all(isinstance(unit.shard_group, CountingGroup) for unit in units)
    found = gradients(model)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
    groups = {
        id(g): g for u in units for g in (u.shard_group, u.scatter_group, u.replicate_group) if g is not None
    }
    traffic = {id(g.traffic): g.traffic for g in groups.values()}.values()
    return error, sum(t.wire_bytes for t in traffic), len(units)
