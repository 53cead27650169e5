"""Frozen weights in FP8 on the native backend: the bits of the run that keeps them, eager, compiled, recomputed and cached."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import foundry_fp8
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight

RECIPES = {"current": {"name": "current", "power_2_scales": True}, "block": "block"}


def make(recipe, device, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 160, bias=False), nn.Linear(160, 64))
    model[:2].requires_grad_(False)
    model[2].requires_grad_(False)
    model = model.to(device)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="native", **options)
    return model


def step(model, device, call=None):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=generator).to(device).requires_grad_()
    y = (call or model)(x)
    y.backward(torch.randn(y.shape, generator=generator).to(device))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def recomputed(model):
    return lambda x: checkpoint(model, x, use_reentrant=False)


def compiled(model):
    return torch.compile(model, backend="aot_eager")


CALLS = {"eager": None, "recomputed": recomputed, "compiled": compiled}


@pytest.mark.parametrize(
    ("recipe", "cached", "call"),
    [
        # Of block scaling eager alone: how weights are kept is every recipe's.
        pytest.param(
            RECIPES[recipe],
            cached,
            call,
            id=f"{recipe}-{'cached' if cached else ''}-{name}",
            marks=pytest.mark.full if call and (recipe == "block" or (cached and name == "compiled")) else (),
        )
        for recipe in RECIPES
        for cached in (False, True)
        for name, call in CALLS.items()
    ],
)
def test_it_is_the_run_that_keeps_the_weights(recipe, cached, call, device):
    ours = make(recipe, device, frozen_weights="fp8", cache_weights=cached)
    assert [type(m.weight) is FrozenFP8Weight for m in (ours[0], ours[2], ours[3])] == [True, True, False]
    theirs = make(recipe, device)
    found = step(ours, device, call and call(ours))
    for mine, its in zip(found, step(theirs, device, call and call(theirs)), strict=True):
        assert torch.equal(mine, its)
