"""A native backend lives as long as its model, however many there were in the process."""

import gc
import weakref

import torch
from torch import nn
from torch.optim import optimizer

import foundry_fp8


def test_backends_are_freed_with_their_models_and_leave_one_hook_for_all(device):
    def run(cached):
        model = nn.Sequential(nn.Linear(32, 32))
        foundry_fp8.apply_fp8(model, recipe="current", backend="native", cache_weights=cached)
        model.to(device)(torch.randn(16, 32, device=device)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        return weakref.ref(model[0].backend)

    run(cached=True)
    hooks = len(optimizer._global_optimizer_post_hooks)
    backends = [run(cached) for cached in (False, True) * 3]
    gc.collect()
    assert all(backend() is None for backend in backends)
    assert len(optimizer._global_optimizer_post_hooks) == hooks
