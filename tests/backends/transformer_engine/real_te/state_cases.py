"""FP8 state, checkpoints, recompute and copies over Transformer Engine's own Python. Run by test_real_te.py."""

import copy

import pytest
import torch
from real_te.models import BACKENDS, PER_TENSOR, RECIPES, Net, Single, converted, step
from torch import nn

from foundry_fp8.backends.transformer_engine.backend import te_module_of
from foundry_fp8.backends.transformer_engine.library import library
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import (
    CurrentScaling,
    DelayedScaling,
)
from foundry_fp8.surgery.apply import apply_fp8


@pytest.mark.parametrize("recipe", [r for r in PER_TENSOR if isinstance(r, DelayedScaling)], ids=repr)
def test_delayed_state_is_that_of_the_reference_and_te_keeps_none(recipe):
    nets = [converted(backend, recipe, net=Single()) for backend in BACKENDS]
    nets[1].load_state_dict(nets[0].state_dict())
    for seed in range(6):
        for net in nets:
            step(net, seed)
    states = [FP8State.of(net) for net in nets]
    for state in states:
        state.update()
    ours, theirs = (state.state_dict()["modules"] for state in states)
    for name in ours:
        for key in ("scale", "amax_history"):
            assert torch.equal(ours[name][key], theirs[name][key])
        assert (ours[name]["scale"] != 1).all()
    manager = library().quantization.FP8GlobalStateManager
    buffers = getattr(manager, "quantization_state", manager)
    assert not buffers.global_amax_buffer


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_model_keeps_parameters_names_and_state(recipe):
    net = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 256, bias=False))
    before = dict(net.named_parameters())
    keys = list(net.state_dict())
    apply_fp8(net, recipe=recipe, backend="transformer_engine", device="cpu")
    assert list(net.state_dict()) == keys == list(before)
    assert all(net.get_parameter(name) is parameter for name, parameter in before.items())
    assert [type(m) for m in net.modules()] == [nn.Sequential, FP8Linear, FP8Linear]


def test_meta_model_converts_and_initialises_itself():
    with torch.device("meta"):
        net = Net()
    apply_fp8(net, recipe="current", backend="transformer_engine", device="cpu")
    assert all(p.is_meta for p in net.parameters())
    net.to_empty(device="cpu")
    for module in (net.up, net.down):
        module.reset_parameters()
    assert step(net, 0)["y"].isfinite().all()


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_recompute_runs_in_fp8_and_is_bit_identical(recipe, casts):
    results = []
    for recompute in (False, True):
        net = converted(recipe=recipe)
        net.recompute = recompute
        casts.clear()
        results.append([step(net, seed) for seed in range(3)])
        forwards = 2 if recompute else 1
        assert len(casts) == 3 * 2 * (2 * forwards + 1)  # steps x layers x (x and w a forward, and dy)
        results[-1].append(
            {k: v for n, m in FP8State.of(net).state_dict()["modules"].items() for k, v in m.items()}
        )
    for plain, recomputed in zip(*results, strict=True):
        for name in plain:
            assert torch.equal(plain[name], recomputed[name]), name


def test_recipe_can_change_at_run_time(casts):
    net = converted(recipe="delayed")
    step(net, 0)
    casts.clear()
    net.down.set_recipe(CurrentScaling(fp8_format="e4m3"))
    net.up.set_recipe(None)
    step(net, 1)
    assert [(kind, fp8) for kind, fp8, _ in casts] == [
        ("Float8CurrentScalingQuantizer", torch.float8_e4m3fn)
    ] * 3
    casts.clear()
    net.down.set_recipe(CurrentScaling())  # the same class again: TE itself would keep the old quantisers
    step(net, 2)
    assert [fp8 for _, fp8, _ in casts] == [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2]
    casts.clear()
    for layer in (net.up, net.down):
        layer.set_recipe(layer.configured_recipe)
    step(net, 3)
    assert {kind for kind, _, _ in casts} == {"Float8Quantizer"} and len(casts) == 6


@pytest.mark.parametrize("evaluate, expected", [("high_precision", 0), ("fp8", 4)])
def test_evaluation_runs_what_was_asked_and_leaves_the_history_alone(evaluate, expected, casts):
    net = converted(recipe="delayed", evaluate=evaluate)
    step(net, 0)
    state = FP8State.of(net)
    state.update()
    before = copy.deepcopy(state.state_dict())
    net.eval()
    casts.clear()
    with torch.no_grad():
        net(1e4 * torch.randn(16, 64).bfloat16())
    assert len(casts) == expected
    after = state.state_dict()
    for name, entry in before["modules"].items():
        assert all(torch.equal(entry[key], after["modules"][name][key]) for key in entry)


def test_state_resumes_bit_exact():
    net = converted(recipe=DelayedScaling(amax_history_len=3))
    for seed in range(3):
        step(net, seed)
    FP8State.of(net).update()
    resumed = converted(recipe=DelayedScaling(amax_history_len=3), seed=1)
    resumed.load_state_dict(net.state_dict())
    FP8State.of(resumed).load_state_dict(copy.deepcopy(FP8State.of(net).state_dict()))
    ours, theirs = step(net, 9), step(resumed, 9)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_copies_and_pickles_work(tmp_path):
    net = converted(recipe="delayed")
    step(net, 0)
    twin = copy.deepcopy(net)
    ours, theirs = step(net, 1), step(twin, 1)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_te_sees_no_tensor_between_forwards():
    net = converted()
    step(net, 0)
    te_module = te_module_of(net.up, net.up.recipe)
    assert not list(te_module.parameters()) and te_module not in list(net.modules())
