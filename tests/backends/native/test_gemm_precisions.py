"""GEMMs of a layer that a rule takes out of FP8, or dequantises, on the native backend: each against float64, beside the others."""

import itertools

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
)
from tests.backends.native.test_linear import by_reference, ranged

HIGH, DEQUANTIZED = "high_precision", "dequantized"
RECIPES = [
    CurrentScaling(), CurrentScaling(granularity="row"), DelayedScaling(), BlockScaling(), MXFP8Scaling(),
]  # fmt: skip
RULES = [
    {"fprop": HIGH},
    {"dgrad": HIGH},
    {"fprop": DEQUANTIZED},
    {"dgrad": DEQUANTIZED, "wgrad": DEQUANTIZED},
    {"fprop": HIGH, "dgrad": DEQUANTIZED},
    {"fprop": DEQUANTIZED, "dgrad": HIGH, "wgrad": HIGH},
]


def made(recipe, gemms, device, dtype, k=96, n=160, **options):
    model = nn.Sequential(nn.Linear(k, n, bias=False, dtype=dtype))
    model[0].weight.data = ranged(n, k).to(dtype)
    rule = {"modules": "*", "recipe": recipe.to_dict(), "gemms": gemms}
    foundry_fp8.apply_fp8(model.to(device), recipe=[rule], backend="native", **options)
    return model


def products(model, recipe, gemms, x, dy):
    """What each GEMM's operands stand for, multiplied in float64."""
    w = model[0].weight
    one = torch.ones((), device=x.device) if isinstance(recipe, DelayedScaling) else None  # its first scale

    def dense(gemm, t, operand, along):
        t, how = t.detach(), gemms.get(gemm, "fp8")
        if how == HIGH:
            return t.double()
        values = by_reference(t, operand, recipe, along, one)
        return values if how == "fp8" else values.to(t.dtype).double()

    return {
        "fprop": dense("fprop", x, "x", 1) @ dense("fprop", w, "w", 1).t(),
        "dgrad": dense("dgrad", dy, "dy", 1) @ dense("dgrad", w, "w", 0),
        "wgrad": dense("wgrad", dy, "dy", 0).t() @ dense("wgrad", x, "x", 0),
    }


def cases():
    """By default every rule in two or three of the recipes, and every recipe in half of the rules or more."""
    for (i, recipe), (j, gemms) in itertools.product(enumerate(RECIPES), enumerate(RULES)):
        for dtype in (torch.float32, torch.bfloat16):
            quick = dtype == torch.bfloat16 and (i + j) % 2 == 0
            name = f"{dtype}-{gemms}-{recipe.name}{'-row' * recipe.by_row}"
            yield pytest.param(recipe, gemms, dtype, id=name, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(("recipe", "gemms", "dtype"), list(cases()))
def test_each_gemm_multiplies_what_its_rule_says(recipe, gemms, dtype, device):
    model = made(recipe, gemms, device, dtype)
    x, dy = (ranged(40, size).to(dtype).to(device) for size in (96, 160))
    y = model(x.requires_grad_())
    y.backward(dy)
    ours = {"fprop": y.detach(), "dgrad": x.grad, "wgrad": model[0].weight.grad}
    for gemm, exact in products(model, recipe, gemms, x, dy).items():
        # torch's GEMM with a scale a row writes bfloat16, whatever is asked for.
        rounds = dtype == torch.bfloat16 or (recipe.by_row and gemm not in gemms)
        error = (ours[gemm].double() - exact).abs()
        assert bool((error <= exact.abs() * 2.0**-8 * rounds + exact.abs().max() * 1e-5).all()), gemm
    hp = "fp32" if dtype == torch.float32 else "bf16"
    assert set(model[0].ledger.calls) == {
        (gemm, hp if gemm in gemms else "fp8") for gemm in ("fprop", "dgrad", "wgrad")
    }


def test_an_overflow_stays_visible_in_every_gemm(device):
    gemms = dict.fromkeys(("fprop", "dgrad", "wgrad"), DEQUANTIZED)
    model = made(CurrentScaling(), gemms, device, torch.float32)
    x = ranged(40, 96)
    x[3, 5] = torch.inf
    x = x.to(device).requires_grad_()
    y = model(x)
    y.backward(torch.ones_like(y))
    assert not y[3].isfinite().any() and not model[0].weight.grad[:, 5].isfinite().any()


@pytest.mark.parametrize("gemms", [{"fprop": HIGH}, {"dgrad": DEQUANTIZED, "wgrad": DEQUANTIZED}], ids=str)
def test_delayed_scales_move_as_if_every_gemm_were_in_fp8(gemms, device):
    """A layer that returns to FP8 finds its history warm."""
    batches, scales = [(ranged(40, 96) * 3**i, ranged(40, 160)) for i in range(3)], []
    for rule in (gemms, {}):
        torch.manual_seed(0)
        model = made(DelayedScaling(), rule, device, torch.float32)
        for x, dy in batches:
            model(x.to(device).requires_grad_()).backward(dy.to(device))
        FP8State.of(model).update()
        scales.append(FP8State.of(model).delayed.scale)
    assert torch.equal(*scales)


@pytest.mark.parametrize(
    "gemms",
    [
        pytest.param({"fprop": HIGH}, marks=pytest.mark.full),
        {"dgrad": HIGH},
        {"fprop": DEQUANTIZED, "wgrad": DEQUANTIZED},
    ],
    ids=str,
)
def test_cached_weights_and_compiled_graphs_give_the_same_bits(gemms, device):
    torch.compiler.reset()
    x, dy = ranged(40, 96).to(device), ranged(40, 160).to(device)
    found = []
    for options, compiled in (({}, False), ({"cache_weights": True}, False), ({}, True)):
        torch.manual_seed(0)
        model = made(CurrentScaling(), gemms, device, torch.float32, **options)
        run = torch.compile(model[0], backend="aot_eager", fullgraph=True) if compiled else model
        given = x.clone().requires_grad_()
        y = run(given)
        y.backward(dy)
        found.append((y.detach(), given.grad, model[0].weight.grad))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
