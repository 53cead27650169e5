"""What is remembered of a linear's passes serves passes of the same kind only: each property that distinguishes kinds is varied alone."""

import itertools

import torch
from torch import nn

import foundry_fp8
from foundry_fp8.backends.native import passes as passes_kept
from foundry_fp8.kernels.launch import BoundedCache
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, DelayedScaling
from tests.kernels.interpreter import DEVICE

RECIPES = {
    "current": CurrentScaling(),
    "powers of two": CurrentScaling(power_2_scales=True),
    "e4m3": CurrentScaling(fp8_format="e4m3"),
    "delayed": DelayedScaling(),
    "block": BlockScaling(),
    "any scales": BlockScaling(power_2_scales=False),
}
M, K, N = 16, 32, 48


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * 3


def strided(x):
    """The same values, rows twice as far apart."""
    return torch.cat([x, torch.full_like(x, 1e4)], dim=-1)[..., : x.shape[-1]]


def by_columns(x):
    return x.t().contiguous().t()


def shifted(x):
    """The same values at an address that is no multiple of 16."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


def same(x):
    return x


PASSES = [
    *((recipe, M, torch.bfloat16, same, same, same, True) for recipe in RECIPES),
    ("current", M, torch.float32, same, same, same, True),
    ("current", M, torch.float16, same, same, same, True),
    ("current", 2 * M, torch.bfloat16, same, same, same, True),
    ("current", M - 3, torch.bfloat16, same, same, same, True),
    *(
        ("current", M, torch.bfloat16, *given, True)
        for change in (strided, by_columns, shifted)
        for given in ((change, same, same), (same, same, change))
    ),
    ("current", M, torch.bfloat16, same, shifted, same, True),
    ("current", M, torch.bfloat16, same, by_columns, same, True),
    ("current", M, torch.bfloat16, same, same, same, False),
    ("current", M, torch.bfloat16, same, same, same, True, K),
    ("block", M, torch.bfloat16, strided, shifted, by_columns, True),
    ("delayed", M, torch.bfloat16, shifted, same, strided, True),
]


def run(model, tokens, dtype, of_x, of_dy):
    """Output and gradients of one forward and backward of linears that read one input."""
    n = model[0].out_features
    x = of_x(values(tokens, K, seed=1).to(dtype)).requires_grad_()
    outputs = [linear(x) for linear in model]
    torch.autograd.backward(outputs, [of_dy(values(tokens, n, seed=2 + i).to(dtype)) for i in range(2)])
    return [*outputs, x.grad, *(linear.weight.grad for linear in model)]


def made(recipe, dtype, of_weight, trains, n=N):
    """Two linears, the scales of which lie at addresses that are aligned differently."""
    model = nn.ModuleList([nn.Linear(K, n, bias=False, dtype=dtype) for _ in range(2)])
    for i, linear in enumerate(model):
        linear.weight.data = of_weight(values(n, K, seed=8 + i).to(dtype))
        linear.weight.requires_grad_(trains)
    foundry_fp8.apply_fp8(model, recipe=RECIPES[recipe], backend="native")
    return model


def passes():
    for recipe, tokens, dtype, of_x, of_weight, of_dy, *of_model in PASSES:
        yield run(made(recipe, dtype, of_weight, *of_model), tokens, dtype, of_x, of_dy)


def test_a_pass_gives_what_it_gives_when_nothing_is_remembered(device, monkeypatch):
    alone = []
    for one in passes():
        alone.append(one)
        monkeypatch.setattr(passes_kept, "_passes", BoundedCache())
    for given, found, expected in zip(PASSES, passes(), alone, strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs), given


def test_a_recipe_that_changes_between_two_passes(device):
    """As the divergence guard changes it."""
    model = made("current", torch.bfloat16, same, True)
    for recipe in ("current", "block", "powers of two", "e4m3", "any scales", "current", "block"):
        for linear in model:
            linear.set_recipe(RECIPES[recipe])
            linear.weight.grad = None
        found = run(model, M, torch.bfloat16, same, same)
        expected = run(made(recipe, torch.bfloat16, same, True), M, torch.bfloat16, same, same)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), recipe


def test_x_and_dy_of_one_shape_keep_their_formats(device):
    model = nn.Sequential(nn.Linear(K, K, bias=False, dtype=torch.bfloat16)).to(device)
    foundry_fp8.apply_fp8(model, recipe=CurrentScaling(fp8_format="hybrid"), backend="native")
    seen = {}
    model[0].probe = lambda operand, x, quantized: seen.update({operand: quantized.data.dtype})
    x = values(M, K).to(torch.bfloat16).requires_grad_()
    model(x).backward(values(M, K, seed=1).to(torch.bfloat16))
    assert seen == {"x": torch.float8_e4m3fn, "w": torch.float8_e4m3fn, "dy": torch.float8_e5m2}


def test_plans_that_come_and_go_are_distinguished(device):
    """Each of a recipe of its own, which is gone when the next one is made, maybe in its place."""
    found = []
    for power_2 in (True, False) * 2:
        model = made("current", torch.bfloat16, same, True)
        for linear in model:
            linear.set_recipe(CurrentScaling(power_2_scales=power_2))
        found.append(run(model, M, torch.bfloat16, same, same))
    for one, other in itertools.pairwise(found):
        assert not torch.equal(one[0], other[0])
    for one, other in zip(found, found[2:], strict=False):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_a_pass_on_another_device_than_the_current_one_is_left_to_functions_that_enter_it(
    device, monkeypatch
):

    expected = run(made("current", torch.bfloat16, same, True), M, torch.bfloat16, same, same)
    monkeypatch.setattr(passes_kept, "_passes", BoundedCache())
    monkeypatch.setattr(passes_kept, "on_current_device", lambda x: False)
    found = run(made("current", torch.bfloat16, same, True), M, torch.bfloat16, same, same)
    assert not passes_kept._passes
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_what_is_kept_of_a_kind_holds_no_tensor_of_a_pass(device, monkeypatch):
    monkeypatch.setattr(passes_kept, "_passes", BoundedCache())
    run(made("current", torch.bfloat16, same, True), M, torch.bfloat16, same, same)
    assert passes_kept._passes
    kept = list(passes_kept._passes.values())
    for _ in range(4):
        kept = [
            part
            for one in kept
            for part in (
                one.values()
                if isinstance(one, dict)
                else one
                if isinstance(one, tuple)
                else (getattr(one, name) for name in getattr(type(one), "__slots__", ()))
            )
        ]
        assert all(part.numel() == 0 for part in kept if isinstance(part, torch.Tensor))
