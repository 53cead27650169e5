"""The native backend under FSDP1 and FSDP2 on one rank: the same gradients as without."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import foundry_fp8
from foundry_fp8.state import FP8State


@pytest.fixture
def one_rank(device):
    if dist.is_initialized():  # by a Composer run earlier in this process, with one rank too
        yield
        return
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def make(recipe, device, cache_weights=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48)).to(device)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="native")
    FP8State.of(model).backend.cache_weights = cache_weights
    return model


def train(model, device, steps=3):
    """Three steps of two microbatches; the gradients of the last, and the losses."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(24, 32, generator=generator).to(device)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.parametrize("wrap", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.parametrize("cache_weights", [False, True])
def test_trains_as_without_fsdp(recipe, wrap, cache_weights, device, one_rank):
    plain = train(make(recipe, device), device)
    model = make(recipe, device, cache_weights)
    if wrap == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device(device))
    else:
        mesh = dist.init_device_mesh(device, (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
    assert train(model, device) == plain
