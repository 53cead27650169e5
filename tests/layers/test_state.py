import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from foundry_fp8.layers.state import FP8State
from foundry_fp8.surgery.apply import apply_fp8


def test_recomputing_the_root_itself_updates_nothing():
    """A checkpoint around the whole model re-runs its hooks in the backward, where the pass is still running."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32))
        apply_fp8(model, recipe="delayed", backend="emulated")
        for seed in range(3):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
            y.square().sum().backward()
        results.append((x.grad, model[0].weight.grad, FP8State.of(model).delayed.amax_history.clone()))
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)
