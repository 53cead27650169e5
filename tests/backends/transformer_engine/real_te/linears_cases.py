"""GEMMs, casts and recipes over Transformer Engine's own Python, cast and GEMM computed on the CPU. Run by test_real_te.py."""

import dataclasses

import pytest
import torch
from real_te.models import BACKENDS, PER_TENSOR, RECIPES, Net, Single, assert_same, converted, step
from torch import nn

from foundry_fp8.backends.transformer_engine.library import library
from foundry_fp8.backends.transformer_engine.recipes import te_recipe_of
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    parse_recipe,
)
from foundry_fp8.surgery.apply import apply_fp8


@pytest.mark.parametrize("recipe", PER_TENSOR, ids=repr)
@pytest.mark.parametrize("bias", [True, False])
def test_three_gemms_match_the_reference_over_several_steps(recipe, bias):
    nets = [converted(backend, recipe, net=Single(bias)) for backend in BACKENDS]
    nets[1].load_state_dict(nets[0].state_dict())
    for seed in range(4):
        assert_same(step(nets[0], seed), step(nets[1], seed))


def test_delayed_casts_use_the_scales_of_the_state(casts):
    net = converted(recipe=DelayedScaling(amax_history_len=2))
    step(net, 0)
    assert {scale for _, _, scale in casts} == {1.0}
    casts.clear()
    step(net, 1)
    scales = FP8State.of(net).delayed.scale.tolist()
    assert sorted(scale for _, _, scale in casts) == sorted(scales)
    assert {kind for kind, _, _ in casts} == {"Float8Quantizer"}


@pytest.mark.parametrize("recipe", [CurrentScaling, DelayedScaling])
@pytest.mark.parametrize("fast", [(), ("fprop",), ("dgrad",), ("fprop", "wgrad")], ids=str)
def test_the_recipe_says_which_gemms_accumulate_fast(recipe, fast, split_accumulators):
    step(converted(recipe=recipe(fast_accumulation=fast), net=Single()), 0)
    fprop, *backward = split_accumulators
    assert fprop == ("fprop" not in fast)
    assert sorted(backward) == sorted(gemm not in fast for gemm in ("dgrad", "wgrad"))


@pytest.mark.parametrize("fp8_format, dy", [("hybrid", torch.float8_e5m2), ("e4m3", torch.float8_e4m3fn)])
def test_operands_have_the_formats_of_the_recipe(fp8_format, dy, casts):
    net = nn.Linear(64, 32).bfloat16()
    apply_fp8(
        net2 := nn.Sequential(net),
        recipe=CurrentScaling(fp8_format=fp8_format),
        backend="transformer_engine",
        device="cpu",
    )
    net2(torch.randn(16, 64).bfloat16().requires_grad_()).sum().backward()
    assert [fp8 for _, fp8, _ in casts] == [torch.float8_e4m3fn, torch.float8_e4m3fn, dy]


def test_power_2_current_scales_take_effect_without_the_environment(casts):
    step(converted(recipe=CurrentScaling(power_2_scales=True)), 0)
    assert casts and all(torch.frexp(torch.tensor(scale))[0] == 0.5 for _, _, scale in casts)
    casts.clear()
    step(converted(recipe=CurrentScaling()), 0)
    assert any(torch.frexp(torch.tensor(scale))[0] != 0.5 for _, _, scale in casts)


@pytest.mark.parametrize("power_2", [True, False])
def test_block_scales_follow_the_recipe(power_2):
    te_recipe = te_recipe_of(BlockScaling(power_2_scales=power_2))
    create = library().quantization.RecipeState.create
    quantizers = [*create(te_recipe, mode="forward", num_quantizers=3).make_quantizers()]
    quantizers += create(te_recipe, mode="backward", num_quantizers=2).make_quantizers()
    assert {q.force_pow_2_scales for q in quantizers} == {power_2}
    assert {q.block_scaling_dim for q in quantizers[:2]} == {1, 2}


def test_te_itself_is_asked_last():
    refusals = {name: library().refusal(name) for name in ("delayed", "current", "block", "mxfp8")}
    assert (
        refusals["delayed"] is refusals["current"] is refusals["mxfp8"] is None
    )  # on compute capability 10.0
    assert refusals["block"] is None or "CUDA >= 12.9" in refusals["block"]


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_every_field_of_a_recipe_reaches_te(recipe, monkeypatch):
    te_recipe = te_recipe_of(recipe)
    formats = library().recipe.Format
    assert te_recipe.fp8_format == {"hybrid": formats.HYBRID, "e4m3": formats.E4M3}[recipe.fp8_format]
    assert getattr(te_recipe, "backward_override", None) is None
    assert not te_recipe.fp8_dpa and not te_recipe.fp8_mha
    if isinstance(recipe, CurrentScaling | BlockScaling):
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            assert getattr(te_recipe, name).power_2_scale is recipe.power_2_scales
    if isinstance(recipe, BlockScaling):
        dims = te_recipe.x_block_scaling_dim, te_recipe.w_block_scaling_dim, te_recipe.grad_block_scaling_dim
        assert dims == (1, 2, 1)
    assert te_recipe_of(dataclasses.replace(recipe)) is te_recipe


def test_high_precision_wgrad_is_the_unquantised_product(casts):
    nets = [converted(wgrad=wgrad) for wgrad in ("fp8", "high_precision")]
    fp8, hp = (step(net, 0) for net in nets)
    assert torch.equal(fp8["y"], hp["y"]) and torch.equal(fp8["x.grad"], hp["x.grad"])
    assert torch.equal(fp8["up.bias.grad"], hp["up.bias.grad"])
    assert not torch.equal(fp8["down.weight.grad"], hp["down.weight.grad"])
    layer = nn.Sequential(nn.Linear(64, 32).bfloat16())
    apply_fp8(layer, recipe="current", backend="transformer_engine", device="cpu", wgrad="high_precision")
    x, dy = torch.randn(16, 64).bfloat16(), torch.randn(16, 32).bfloat16()
    layer(x).backward(dy)  # an input that needs no gradient: the weight must get one all the same
    torch.testing.assert_close(layer[0].weight.grad, dy.t() @ x, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [1, 7, 16, 33])
def test_any_number_of_tokens_is_exact(tokens):
    nets = [converted(backend, net=Single()) for backend in BACKENDS]
    nets[1].load_state_dict(nets[0].state_dict())
    assert_same(*(step(net, 0, shape=(tokens,)) for net in nets))


def test_autocast_computes_in_its_dtype_from_float32_parameters():
    net = converted(net=Net(dtype=torch.float32))
    x = torch.randn(16, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == net.up.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("wgrad", ["fp8", "high_precision"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_nan_and_inf_stay_visible(recipe, value, wgrad):
    net = converted(recipe=recipe, net=Single(), wgrad=wgrad)
    x, dy = torch.randn(16, 64).bfloat16().requires_grad_(), torch.randn(16, 32).bfloat16()
    poisoned_x, poisoned_dy = x.detach().clone(), dy.clone()
    poisoned_x[3, 5] = poisoned_dy[7, 1] = value
    assert not net(poisoned_x).isfinite().all()
    with torch.no_grad():
        assert not net(poisoned_x).isfinite().all()
    y = net(x)
    assert y.isfinite().all()
    y.backward(poisoned_dy)
    assert not net.proj.weight.grad.isfinite().all() and not x.grad.isfinite().all()
    assert poisoned_dy[7, 1].isnan() == torch.tensor(value).isnan()


def test_probe_sees_each_operand_once():
    net = converted(recipe="delayed")
    step(net, 0)
    seen = []
    net.down.probe = lambda operand, x, quantized: seen.append((operand, tuple(x.shape), quantized))
    step(net, 1)
    assert [(operand, shape) for operand, shape, _ in seen] == [
        ("x", (32, 128)),
        ("w", (32, 128)),
        ("dy", (32, 32)),
    ]
    scales = [float(slot.scale) for slot in net.down.slots.values()]
    assert [1 / float(quantized.scale_inv) for _, _, quantized in seen] == pytest.approx(scales)


def test_empty_input_gives_an_empty_output():
    assert converted()(torch.empty(0, 64).bfloat16()).shape == (0, 32)


def test_unknown_fields_never_reach_te():
    with pytest.raises(ValueError, match=r"override_linear_precision: unknown key"):
        parse_recipe({"name": "delayed", "override_linear_precision": [0, 0, 1]})
