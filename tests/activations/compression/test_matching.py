"""Which modules get fused forms, by module and class; copies and pickles of models that have them."""

from __future__ import annotations

import copy
import importlib
import io

import pytest
import torch
from torch import nn

from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing
from foundry_fp8.activations.compression.apply import apply_activation_compression
from foundry_fp8.activations.compression.matching import LAYER_NORMS, MLPS, RMS_NORMS, fuse_mlp, fuse_norm
from foundry_fp8.surgery.apply import apply_fp8
from tests.activations.compression.test_apply import error, gradients

WIDTH = 64


class RMSNorm(nn.Module):
    """Of the name of torch's, and of anybody's: with the weight that Gemma's has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) / 3)
        self.eps = 1e-6

    def forward(self, x):
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class SiLU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


def gradients_of(module, x, dy):
    x = x.clone().requires_grad_()
    parameters = list(module.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(module(x), [x, *parameters], dy)])


def test_a_norm_of_a_known_name_that_computes_something_else_keeps_its_gradients():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(RMSNorm(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    torch.manual_seed(0)
    model, (x, dy) = Model(), torch.randn(2, 32, WIDTH)
    plain = gradients_of(model, x, dy)
    report = apply_activation_compression(model, format="exact", min_numel=1)
    assert not [row for row in report.rows if row[1].startswith("fused")]
    assert torch.equal(gradients_of(model, x, dy), plain)


def test_a_subclass_a_replaced_forward_and_a_similar_activation_are_left_alone(monkeypatch):
    from transformers.models.llama import modeling_llama

    class Scaled(nn.LayerNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    patched = nn.LayerNorm(WIDTH)
    patched.forward = lambda x: x
    assert not fuse_norm(Scaled(WIDTH), None) and not fuse_norm(patched, None)
    config = modeling_llama.LlamaConfig(hidden_size=WIDTH, intermediate_size=96)
    mlp = modeling_llama.LlamaMLP(config)
    mlp.act_fn = SiLU()
    assert not fuse_mlp(mlp, None)
    mlp.act_fn = nn.SiLU()
    assert fuse_mlp(mlp, None)
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", RMSNorm.forward)
    assert not fuse_norm(modeling_llama.LlamaRMSNorm(WIDTH), None)


@pytest.mark.parametrize("name", sorted(RMS_NORMS | LAYER_NORMS))
def test_every_norm_in_the_list_is_what_the_list_says(name):
    """Against float64 autograd of the formula, with a weight that is neither 0 nor 1."""
    module, _, cls = name.rpartition(".")
    torch.manual_seed(0)
    norm = getattr(importlib.import_module(module), cls)(WIDTH, eps=1e-5)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 2.0)
    x, dy = torch.randn(2, 32, WIDTH) * 3 + 1

    def formula(x):
        weight, bias = norm.weight.double(), getattr(norm, "bias", None)
        if name in LAYER_NORMS:
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
        return y if bias is None else y + bias.double()

    exact = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(formula(exact), exact, dy.double())
    assert fuse_norm(norm, None)
    ours = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(norm(ours), ours, dy)
    torch.testing.assert_close(dx.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(MLPS))
def test_every_mlp_in_the_list_exists(name):
    module, _, cls = name.rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), cls), nn.Module)


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("again", [pickled, copy.deepcopy])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_compressed_model_is_pickled_and_copied_as_one(make_llama, again, fp8):
    model = make_llama(3)
    plain = gradients(model)[1]
    if fp8:
        apply_fp8(model, recipe="current", backend="emulated")
    apply_activation_checkpointing(
        model, targets=[{"target": "LlamaDecoderLayer", "blocks": [0], "policy": "selective"}]
    )
    apply_activation_compression(model, min_numel=1024)
    expected = gradients(model)
    other = again(model)
    model.zero_grad(set_to_none=True)
    ours = gradients(other)
    assert ours[0] == expected[0] and torch.equal(ours[1], expected[1])
    assert fp8 or 1e-4 < error(ours[1], plain) < 1e-2  # it compresses
    assert all(p.grad is None for p in model.parameters())
