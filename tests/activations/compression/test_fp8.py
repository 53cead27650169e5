"""Beside FP8 linears: what they keep for backward is not packed, and their weights are their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from foundry_fp8.activations.compression.apply import apply_activation_compression
from foundry_fp8.numerics.recipes import FOR_ANY_MODEL
from foundry_fp8.surgery.apply import apply_fp8
from tests.kernels.interpreter import interpret
from tests.one_rank import one_rank

HOOKS_ALONE = {"format": "exact", "overrides": {"norm": "none", "activation": "none", "loss": "none"}}
"""Nothing is rounded and nothing is computed in another way, so that gradients are equal bit for bit."""


class Block(nn.Module):
    """Projections of one shape that read one tensor, as in attention and in gated units."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return x + self.out(torch.tanh(self.q(x)) * self.k(x) + self.v(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def group():
    one_rank()


def make(recipe, wrap, options, **fp8):
    torch.manual_seed(0)
    model = Model()
    apply_fp8(model, recipe=recipe, **{"backend": "emulated", **fp8})
    if wrap == "fsdp1":
        policy = ModuleWrapPolicy({Block})
        model = FullyShardedDataParallel(
            model, use_orig_params=True, auto_wrap_policy=policy, device_id=torch.device("cpu")
        )
    elif wrap == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    report = apply_activation_compression(model, min_numel=64, **options) if options else None
    return model, report


def gradients(model, passes=2, tokens=64, autocast=False):
    """By name; of the last pass, so that delayed scales differ from layer to layer and weight caches are used."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(passes):
        x = torch.randn(2, tokens // 2, 64, generator=generator)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().square().mean().backward()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
            return {name: p.grad.clone() for name, p in model.named_parameters()}
    return {
        name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()
    }


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert torch.equal(gradient, theirs[name]), name


@pytest.mark.parametrize(
    ("recipe", "wgrad"),
    [
        *((recipe, "fp8") for recipe in FOR_ANY_MODEL),
        *(
            pytest.param(recipe, "high_precision", marks=() if recipe == "delayed" else pytest.mark.full)
            for recipe in FOR_ANY_MODEL
        ),
    ],
)
@pytest.mark.parametrize("wrap", ["plain", "fsdp1", "fsdp2"])
def test_emulated_linears_keep_their_own_weight(recipe, wrap, wgrad, group):
    """FSDP1's weights are views in forward, which only the backend can distinguish from an input."""
    plain, compressed = (gradients(make(recipe, wrap, o, wgrad=wgrad)[0]) for o in (None, HOOKS_ALONE))
    assert_equal(compressed, plain)


@pytest.mark.parametrize(
    ("recipe", "wrap", "cache_weights"),
    [
        ("current", "fsdp1", False),
        ("current", "plain", False),
        ("current", "plain", True),
        ("delayed", "plain", True),
        ("block", "plain", True),
        ("mxfp8", "fsdp2", True),
    ],
)
def test_native_linears_keep_their_own_weight(recipe, wrap, cache_weights, group, monkeypatch):
    """A cached weight is FP8 of the shape of its neighbour's, and a weight's statistics are of every weight's shape."""
    interpret(monkeypatch)
    native = {
        "backend": "native",
        "cache_weights": cache_weights,
        "exclude": ["*.out"],
        "keep_first_blocks": 1,
    }
    made = [make(recipe, wrap, options, **native)[0] for options in (None, HOOKS_ALONE)]
    plain, compressed = (gradients(model, passes=1, tokens=16) for model in made)
    assert_equal(compressed, plain)


@pytest.mark.parametrize("wrap", ["plain", "fsdp1"])
def test_under_autocast(wrap, group):
    plain, compressed = (gradients(make("current", wrap, o)[0], autocast=True) for o in (None, HOOKS_ALONE))
    assert_equal(compressed, plain)


@pytest.mark.parametrize("wrap", ["plain", "fsdp1", "fsdp2"])
def test_frozen_weights_are_not_packed(wrap, group):
    """As LoRA's: they need no gradient, so that only what they are views of says that they are weights."""
    torch.manual_seed(0)
    reports = []
    for frozen in (False, True):
        model = Model()
        if frozen:
            for block in model.blocks:
                block.q.requires_grad_(False)
        if wrap == "fsdp1":
            model = FullyShardedDataParallel(
                model,
                use_orig_params=True,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                device_id=torch.device("cpu"),
            )
        elif wrap == "fsdp2":
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        report = apply_activation_compression(model, min_numel=64)
        model(torch.randn(2, 32, 64))
        reports.append(report.saved)
    assert reports[0].original > 0
    assert reports[1].original <= reports[0].original
