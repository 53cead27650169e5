"""Compression of FOG's and its baselines' parts: what is fused, exact forward, every parameter's gradient."""

from __future__ import annotations

import copy

import pytest
import torch

from foundry_fp8.activations.compression.apply import apply_activation_compression
from foundry_fp8.activations.compression.matching import fuse_mlp, fuse_norm
from foundry_fp8.models.fog import FogConfig, FogForCausalLM
from foundry_fp8.models.fog.feedforward import MLP, XIELU, GatedMLP
from foundry_fp8.models.fog.norms import RMSNorm
from foundry_fp8.numerics.packed import PackFormat

INT8 = PackFormat(name="int8")


def relative(ours, reference):
    return float((ours - reference).norm() / reference.norm())


def assert_gradients_hold(module, fuse, width=64):
    """Fused against not, in every gradient; the loss is far from symmetric, so that sums do not cancel."""
    x = torch.randn(4, 50, width, requires_grad=True)
    inputs = [x, *module.parameters()]
    before = torch.autograd.grad(module(x).square().sum(), inputs)
    y = module(x)
    assert fuse(module, INT8)
    assert torch.equal(module(x), y)
    after = torch.autograd.grad(module(x).square().sum(), inputs)
    for ours, reference in zip(after, before, strict=True):
        assert relative(ours, reference) < 1e-2


@pytest.mark.parametrize("options", [{}, {"gain": 0.35}, {"gain": 0.35, "trainable": False}], ids=str)
def test_the_norm_with_its_gain(options):
    torch.manual_seed(0)
    norm = RMSNorm(64, **options)
    weighted = torch.nn.Sequential(norm, torch.nn.Linear(64, 32))
    assert_gradients_hold(weighted, lambda module, fmt: fuse_norm(module[0], fmt))


@pytest.mark.parametrize("activation", ["xielu", "gelu"])
def test_the_plain_mlp(activation):
    torch.manual_seed(0)
    assert_gradients_hold(MLP(64, 128, activation), fuse_mlp)


def test_the_gated_mlp():
    torch.manual_seed(0)
    assert_gradients_hold(GatedMLP(64, 128, "swiglu"), fuse_mlp)


def test_the_mlp_inside_mpt():
    from foundry_fp8.models.fog.mpt_parts import build_fog_ffn

    torch.manual_seed(0)
    assert_gradients_hold(build_fog_ffn(64, 2, post_norm_gain=0.5), fuse_mlp)


def test_what_is_more_than_a_function_of_the_gate_is_left_to_the_hooks():
    assert not fuse_mlp(MLP(64, 128, "relu"), INT8)
    for activation in ("smooth_swiglu", "smooth_swiglu_fog"):
        assert not fuse_mlp(GatedMLP(64, 128, activation), INT8)

    anybodys = type("MLP", (MLP,), {"__module__": "elsewhere"})
    assert not fuse_mlp(anybodys(64, 128, "gelu"), INT8)


def test_a_copy_trains_its_own_slopes():
    torch.manual_seed(0)
    mlp = MLP(64, 128, "xielu")
    assert fuse_mlp(mlp, INT8)
    twin = copy.deepcopy(mlp)
    twin(torch.randn(4, 50, 64)).square().sum().backward()
    assert isinstance(twin.act, XIELU) and twin.act.p.grad is not None and mlp.act.p.grad is None


TOKENS = torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(0))


def build(**options):
    torch.manual_seed(0)
    config = FogConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        **options,
    )
    return FogForCausalLM(config)


def gradients(model):
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("variant", "mlps", "norms"),
    [
        ("fog-max", 3, 12),  # xIELU; post-norms, frozen norms of q and k
        ("fog-flash", 3, 6),  # xIELU; post-norms
        ("llama3", 3, 6),  # SwiGLU from one projection; pre-norms
        ("llama3-smooth-swiglu", 0, 6),  # its scale is a function of all tokens: hooks pack it
    ],
)
def test_known_parts_are_fused_and_gradients_hold(variant, mlps, norms):
    model = build(variant=variant)
    loss, reference = gradients(model)
    report = apply_activation_compression(model, min_numel=1024)
    actions = [action for _, action, _ in report.rows]
    assert (actions.count("fused mlp"), actions.count("fused norm")) == (mlps, norms)
    ours, compressed = gradients(model)
    assert ours == loss
    whole = [torch.cat([g.flatten() for g in of.values()]) for of in (compressed, reference)]
    assert relative(*whole) < 1.5e-2
    for name, gradient in reference.items():
        if gradient.dim() == 2:  # a gain's gradient is a sum over tokens that may cancel
            assert relative(compressed[name], gradient) < 3e-2, name
    report.undo()
    assert all(torch.equal(a, reference[n]) for n, a in gradients(model)[1].items())
