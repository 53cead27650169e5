"""Norms fused into their linears over Transformer Engine's own Python. Run by test_real_te.py."""

import copy

import pytest
import torch
from foundry_fp8.surgery.norm_fusion import SITES
from real_te.models import converted, step
from torch import nn
from torch.utils.checkpoint import checkpoint

from foundry_fp8.layers.state import FP8State
from foundry_fp8.surgery.apply import apply_fp8


class Block(nn.Module):
    """A block as MPT's: each norm feeds one linear."""

    def __init__(self, norm):
        super().__init__()
        self.norm_1 = norm
        self.attn = nn.ModuleDict({"Wqkv": nn.Linear(64, 32)})
        self.to(torch.bfloat16)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape))

    def forward(self, x):
        return self.attn["Wqkv"](self.norm_1(x))


@pytest.fixture
def fusible(monkeypatch):
    monkeypatch.setitem(SITES, f"{Block.__module__}.Block", (("norm_1", "attn.Wqkv"),))


NORMS = {
    "layer": lambda: nn.LayerNorm(64, eps=1e-3),
    "layer without bias": lambda: nn.LayerNorm(64, bias=False),
    "rms": lambda: nn.RMSNorm(64, eps=1e-5),
}


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("norm", NORMS)
def test_fused_norm_computes_what_the_two_modules_do(norm, recipe, fusible, casts):
    nets = [converted(recipe=recipe, net=Block(NORMS[norm]()), seed=3, fuse=fuse) for fuse in (False, True)]
    nets[1].load_state_dict(nets[0].state_dict())
    before = list(nets[0].state_dict())
    assert list(nets[1].state_dict()) == before
    for seed in range(3):
        plain, fused = (step(net, seed) for net in nets)
        assert nets[1].norm_1.deferred
        for name in plain:
            largest = plain[name].abs().max().item()
            torch.testing.assert_close(plain[name], fused[name], rtol=2**-6, atol=2**-6 * largest)
    assert len(casts) == 2 * 3 * 3
    states = [FP8State.of(net).state_dict()["modules"] for net in nets]
    assert states[0].keys() == states[1].keys()


def test_norm_is_not_left_out_where_its_linear_runs_in_high_precision(fusible, casts):
    net = Block(nn.LayerNorm(64))
    x = torch.randn(16, 64).bfloat16()
    expected = net(x)
    converted(net=net, fuse=True)
    net.eval()
    assert torch.equal(net(x), expected) and not net.norm_1.deferred
    net.train()
    net.attn["Wqkv"].set_recipe(None)
    assert torch.equal(net(x), expected) and not casts


def test_fusion_steps_back_where_the_arithmetic_would_differ(fusible, caplog):
    net = converted(net=Block(nn.LayerNorm(64)).float(), fuse=True)
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.randn(16, 64))
    assert not net.norm_1.deferred and "is not fused with its norm" in caplog.text
    net.bfloat16()
    net(torch.randn(7, 64).bfloat16())
    assert not net.norm_1.deferred and "tokens are not a multiple of 16" in caplog.text


def test_report_says_what_was_fused(fusible):
    net = nn.Sequential(Block(nn.LayerNorm(64)), nn.Linear(32, 32).bfloat16(), Block(nn.RMSNorm(64)))
    report = apply_fp8(net, recipe="current", backend="transformer_engine", device="cpu", fuse=True)
    rows = {row.name: row for row in report.rows}
    assert rows["0.attn.Wqkv"].fused_with == "0.norm_1"
    assert not rows["1"].fused_with and not rows["2.attn.Wqkv"].fused_with
    assert "takes eps from the dtype" in rows["2.attn.Wqkv"].reason
    assert "1 of them compute the norm" in report.summary()


def test_fusing_nothing_is_an_error(fusible):
    with pytest.raises(ValueError, match=r"fuse: nothing can be fused: no norm is known"):
        converted(fuse=True)
    with pytest.raises(ValueError, match=r"fuse: nothing can be fused: RMSNorm takes eps"):
        converted(net=Block(nn.RMSNorm(64)), fuse=True)


def test_fused_recompute_is_bit_identical(fusible):
    results = []
    for recompute in (False, True):
        block = Block(nn.LayerNorm(64))
        net = converted(recipe="delayed", net=block, fuse=True, seed=1)
        net.load_state_dict(results[0][0] if results else net.state_dict())
        first = copy.deepcopy(net.state_dict())
        run = (lambda x, net=net: checkpoint(net, x, use_reentrant=False)) if recompute else net
        steps = []
        for seed in range(3):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().requires_grad_()
            net.zero_grad()
            run(x).square().sum().backward()
            steps.append([x.grad, *(p.grad.clone() for p in net.parameters())])
        results.append((first, steps))
    for plain, recomputed in zip(results[0][1], results[1][1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
