"""Native FP8 attention under ``torch.compile``: one whole graph."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from foundry_fp8.layers.attention_mask import AttentionMask
from tests.backends.native.cudnn_stand_in import SMALL_HEADS, stand_in
from tests.backends.native.test_attention import make

WIDTH, HEADS, TOKENS = 32, 2, 24


class Block(nn.Module):
    """FP8 attention and nothing else that rounds: how a graph adds up other products is its own affair."""

    def __init__(self, attention, checkpoints):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.attention = attention
        self.checkpoints = checkpoints

    def attend(self, x):
        q, k, v = (x * self.scale).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mask = AttentionMask(causal=True)
        return self.attention(q, k, v, mask=mask, softmax_scale=0.25).transpose(1, 2).flatten(2)

    def forward(self, x):
        if self.checkpoints:
            return checkpoint(self.attend, x, use_reentrant=False)
        return self.attend(x)


def trained(checkpoints, device, compiled):
    torch.manual_seed(0)
    torch._dynamo.reset()
    attention, state = make()
    assert attention.backend.module_reason(attention.recipe, WIDTH // HEADS) is None  # as a conversion asks
    block = Block(attention, checkpoints).to(device)
    run = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    found = []
    for _ in range(2):
        state.update()
        x = torch.randn(2, TOKENS, 3 * WIDTH, device=device, requires_grad=True)
        block.zero_grad()
        out = run(x)
        out.square().sum().backward()
        found += [out.detach(), x.grad]
    return [*found, state.amax_history.clone(), state.scale.clone()]


@pytest.mark.parametrize("checkpoints", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_same_bits_as_eager(checkpoints, device, monkeypatch):
    stand_in(monkeypatch, SMALL_HEADS)
    eager, traced = (trained(checkpoints, device, compiled) for compiled in (False, True))
    assert [torch.equal(a, b) for a, b in zip(eager, traced, strict=True)] == [True] * len(eager)
