"""For workers: a run that is saved on some ranks and goes on on others, under another wrapper."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8 import FP8Run
from foundry_fp8.distributed.traffic import average_on_gloo
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from tests.multiprocess.tensor_parallel import TOKENS, WIDTH, Stack, split, whole

ROWS, SAVED = 4, 3
"""Of a batch of all ranks; steps before the checkpoint."""


def wrapped(model, how):
    """``model`` as ``how`` says, this rank's place among those that read data, and how many of those there are."""
    world = dist.get_world_size()
    if how == "ddp":
        return DistributedDataParallel(model), dist.get_rank(), world
    tensor = 2 if how == "tp" else 1
    mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("data", "tensor"))
    if how == "tp":
        split(model, mesh["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    average_on_gloo(model)
    return model, mesh["data"].get_local_rank(), world // tensor


def loss_of(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def run(how, recipe, source, target, guard):
    """Train to the checkpoint, or from it; the next step's gradients and all that a checkpoint holds there."""
    dist.init_process_group("gloo")
    model = Stack()
    fp8 = FP8Run(recipe=recipe, backend="emulated", guard=guard and {"interval": 2, "gradient_limit": guard})
    fp8.convert(model, precision="fp32")
    model, place, places = wrapped(model, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fp8.start(model, loss_of)
    if source:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments, "fp8": fp8}, checkpoint_id=source)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    events = []
    for step in range(fp8.step, SAVED + 1):
        if step == SAVED:
            weights, moments = get_state_dict(model, optimizer)
            state = fp8.state_dict()
            saved = {name: whole(w).clone() for name, w in weights.items()}
            steps = {name: whole(m["exp_avg"]).clone() for name, m in moments["state"].items()}
            if target:
                dcp.save({"model": weights, "optimizer": moments, "fp8": fp8}, checkpoint_id=target)
        random = torch.Generator().manual_seed(step)
        rows = slice(place * ROWS // places, (place + 1) * ROWS // places)
        batch = [torch.randn(ROWS, TOKENS // 2, WIDTH, generator=random)[rows] for _ in range(2)]
        events += [str(event) for event in fp8.begin_step(batch)]
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        grads = {
            n.removeprefix("module."): whole(p.grad).clone().double() for n, p in model.named_parameters()
        }
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        fp8.end_step(mean / dist.get_world_size())
    recipes = {
        n.removeprefix("module."): m.recipe and m.recipe.name
        for n, m in model.named_modules()
        if isinstance(m, FP8GemmLayer)
    }
    return grads, saved, steps, state, recipes, events
