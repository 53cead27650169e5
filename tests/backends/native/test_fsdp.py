"""The native backend under FSDP1 and FSDP2 on one rank: the same gradients as without."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import foundry_fp8
from foundry_fp8.backends.native import room
from foundry_fp8.layers.state import FP8State
from tests.one_rank import one_rank


@pytest.fixture
def group(device):
    one_rank(device)


def make(recipe, device, cache_weights=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48)).to(device)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="native", cache_weights=cache_weights)
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


def wrapped(model, wrap, device):
    if wrap.startswith("fsdp1"):
        return FullyShardedDataParallel(
            model,
            use_orig_params=wrap == "fsdp1",
            device_id=torch.device(device),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
    mesh = dist.init_device_mesh(device, (1,))
    if wrap == "fsdp2":
        fully_shard(model[0], mesh=mesh)
        fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


every_wrap = pytest.mark.parametrize("wrap", ["fsdp1", "fsdp1 flat", "fsdp2", "fsdp2 one unit"])


@functools.cache
def losses_without_fsdp(recipe, device):
    return train(make(recipe, device), device)


@pytest.mark.parametrize(
    ("recipe", "wrap", "cache_weights"),
    [  # in the full tier, every pair of two of them
        ("delayed", "fsdp1", False),
        ("delayed", "fsdp2", True),
        ("block", "fsdp1 flat", False),
        ("block", "fsdp2 one unit", True),
        pytest.param("block", "fsdp1", "auto", marks=pytest.mark.full),
        ("delayed", "fsdp2", "auto"),
        pytest.param("delayed", "fsdp1 flat", True, marks=pytest.mark.full),
        pytest.param("delayed", "fsdp2 one unit", False, marks=pytest.mark.full),
        pytest.param("block", "fsdp1", True, marks=pytest.mark.full),
        pytest.param("block", "fsdp2", False, marks=pytest.mark.full),
    ],
)
def test_trains_as_without_fsdp(recipe, wrap, cache_weights, device, group, monkeypatch):
    monkeypatch.setattr(room, "unused_memory", lambda device: 2**40)
    model = make(recipe, device, cache_weights)
    losses = train(wrapped(model, wrap, device), device)
    assert losses == losses_without_fsdp(recipe, device)
    assert FP8State.of(model).backend.room.there is (True if cache_weights == "auto" else None)


def loads(model):
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def writes_in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2.0)


def loads_other_parameters(model):
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()}, assign=True)


@every_wrap
@pytest.mark.parametrize(
    "change", [pytest.param(loads, marks=pytest.mark.full), writes_in_place, loads_other_parameters]
)
def test_cached_weights_notice_a_write_to_a_shard(wrap, change, device, group):
    """Between two microbatches, with no optimizer step that would clear the cache."""
    if change is loads_other_parameters and wrap.startswith("fsdp1"):
        pytest.skip("FSDP1 cannot take other parameters")
    results = []
    for cache_weights in (False, True):
        model = wrapped(make("current", device, cache_weights), wrap, device)
        x = torch.linspace(-1, 1, 16 * 32, device=device).view(16, 32).requires_grad_()
        model(x).square().sum().backward()
        change(model)
        y = model(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    for uncached, cached in zip(*results, strict=True):
        assert torch.equal(uncached, cached)


def test_fsdp1_says_that_it_caches_nothing(device, group, caplog):
    model = wrapped(make("current", device, cache_weights=True), "fsdp1", device)
    for _ in range(2):
        model(torch.ones(16, 32, device=device))
    (record,) = [r for r in caplog.records if "cache_weights has no effect" in r.message]
    assert "Use FSDP2" in record.message
