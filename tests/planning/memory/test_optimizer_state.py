"""Bytes of optimizer states: predicted before the first step, and counted after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foundry_fp8.planning.memory.optimizer_state import optimizer_bytes


def model(dtype=torch.float32):
    built = nn.Sequential(nn.Linear(96, 80), nn.Linear(80, 64)).to(dtype)
    built[1].bias.requires_grad_(False)
    return built


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}, 2),
    "adamw with amsgrad": (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}, 3),
    "sgd": (torch.optim.SGD, {"lr": 1e-3}, 0),
    "sgd with momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, 1),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_before_the_first_step_as_after_it(name, dtype):
    kind, settings, moments = OPTIMIZERS[name]
    built = model(dtype)
    optimizer = kind(built.parameters(), **settings)
    trained = sum(p.nbytes for p in built.parameters() if p.requires_grad)
    assert optimizer_bytes([optimizer]) == moments * trained
    built(torch.ones(2, 96, dtype=dtype)).sum().backward()
    optimizer.step()
    held = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    assert optimizer_bytes([optimizer]) == held == moments * trained


def test_composers_optimizers_and_a_step_that_reached_some_parameters():
    optim = pytest.importorskip("composer.optim")
    built = model()
    trained = sum(p.nbytes for p in built.parameters() if p.requires_grad)
    assert optimizer_bytes([optim.DecoupledAdamW(built.parameters(), lr=1e-3)]) == 2 * trained
    optimizer = optim.DecoupledSGDW(built.parameters(), lr=1e-3, momentum=0.9)
    built[0].weight.grad = torch.ones_like(built[0].weight)
    optimizer.step()
    assert optimizer_bytes([optimizer]) == trained
