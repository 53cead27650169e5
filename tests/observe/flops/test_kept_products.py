"""What selective checkpointing keeps is not counted as recomputed, in each backend; what is recomputed is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.layers.product_operators import LINEAR
from foundry_fp8.observe.flops.observer import Observer
from tests.kernels.interpreter import interpret


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(self.up(x).sigmoid())


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        ("none", ""),
        ("emulated", "current"),
        pytest.param("emulated", "block", marks=pytest.mark.full),
        ("native", "current"),
        pytest.param("native", "block", marks=pytest.mark.full),
    ],
)
def test_kept_products_are_not_recomputed(backend, recipe, policy, monkeypatch):
    if backend == "native":
        interpret(monkeypatch)
    model = Model()
    if backend != "none":
        foundry_fp8.apply_fp8(model, recipe=recipe, backend=backend, include=["*"])
    foundry_fp8.apply_activation_checkpointing(model, targets={"Block": "first-2"}, policy=policy)
    linears = [(name, m, LINEAR) for name, m in model.named_modules() if hasattr(m, "in_features")]
    observer = Observer(linears, lambda hook: hook)
    observer.attach()
    x = torch.randn(
        32, 64, dtype=torch.bfloat16 if backend == "native" else torch.float32, requires_grad=True
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backend == "native"):
        out = model(x)
    out.float().sum().backward()
    assert len(observer.observed) == 4
    for name, seen in observer.observed.items():
        # A recompute ends when the last tensor that backward needs is there, before the last product of a block.
        again = policy == "full" and name.endswith("up")
        assert seen.calls == 1 and seen.recomputed == int(again), name
