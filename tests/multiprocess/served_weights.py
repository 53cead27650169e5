"""For workers: what an FSDP2 run sends to a server, and LoRA on published FP8 weights under DDP."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import foundry_fp8
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight
from tests.export.published import publish, qwen3
from tests.export.test_block_layouts import IDS, llama


def sharded():
    """Whether the weights of an FSDP2 model are those of the same model on one rank."""
    dist.init_process_group("gloo")
    model = llama()
    foundry_fp8.apply_fp8(model, recipe="block", backend="emulated")
    alone = list(foundry_fp8.served_weights(copy.deepcopy(model)))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return alike(list(foundry_fp8.served_weights(model)), alone)


def adapted(folder, wrapper):
    """How far the gradients of what trains, after a backward over each rank's half of a batch, are from those of the whole batch on one rank.

    ``wrapper``: ``ddp``; ``fsdp2``, which shards the codes; or ``ignored``, which leaves them out by ``ignored_params``.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        publish(qwen3(), folder, e8m0=True)
    dist.barrier()
    model = qwen3().requires_grad_(False)
    foundry_fp8.load_fp8(folder, model)
    model.model.layers[0].self_attn.q_norm.requires_grad_(True)
    foundry_fp8.apply_fp8(model, recipe="block", backend="emulated")
    norm = model.model.layers[0].self_attn.q_norm
    (sum(model(input_ids=x[None], labels=x[None]).loss for x in IDS) / 2).backward()
    alone = norm.weight.grad.clone()
    model.zero_grad()
    served = list(foundry_fp8.served_weights(model))
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        wrapped, mesh = model, dist.device_mesh.init_device_mesh("cpu", (2,))
        kept = {p for p in model.parameters() if isinstance(p, FrozenFP8Weight)}
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, ignored_params=kept if wrapper == "ignored" else None)
        left = sum(isinstance(p, FrozenFP8Weight) for p in model.parameters())
        assert (len(kept), left) == (14, 14 if wrapper == "ignored" else 0)
    wrapped(input_ids=IDS[rank : rank + 1], labels=IDS[rank : rank + 1]).loss.backward()
    ours = norm.weight.grad
    if wrapper != "ddp":
        ours = ours.full_tensor()
        ours /= round(
            float(ours.norm() / alone.norm())
        )  # torch 2.7 adds up on gloo where it should average: 2
        assert alike(list(foundry_fp8.served_weights(model)), served)
        with pytest.raises(RuntimeError, match="the model is sharded"):
            foundry_fp8.export_fp8(model, folder / "out", layout="fp8")
    return float((ours - alone).abs().max() / alone.abs().max())


def alike(found, alone):
    """Whether both are the same names, codes and scales."""
    return [name for name, *_ in found] == [name for name, *_ in alone] and all(
        (a is b is None) or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for ours, theirs in zip(found, alone, strict=True)
        for a, b in zip(ours[1:], theirs[1:], strict=True)
    )
