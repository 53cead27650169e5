"""Fused norms and activations against the same modules unfused, on the same backend."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foundry_fp8
from foundry_fp8.backends.native.fused import norm_forward
from foundry_fp8.layers.state import FP8State
from foundry_fp8.model_structure.forms import norm_form
from foundry_fp8.numerics.recipes import FOR_ANY_MODEL
from tests.backends.native.fused_pairs import activation_linear, norm_linear
from tests.backends.native.test_linear import CountOps, hold_scales

every_recipe = pytest.mark.parametrize("recipe", FOR_ANY_MODEL)


def converted(recipe, device, dtype, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64, dtype=dtype)).to(device)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="native", **options)
    return model


def gradients(run, inputs, dy):
    for t in inputs:
        t.grad = None
    y = run()
    y.backward(dy)
    return [y.detach(), *(t.grad for t in inputs)]


def assert_alike(fused, unfused, dtype):
    """Equal up to a rounding of exp or of a row sum that falls the other way in a few elements."""
    tolerance = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-10
    for ours, theirs in zip(fused, unfused, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert float(error) < tolerance, float(error)


@every_recipe
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=str
)
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norm_linear(name, dtype, recipe, device):
    model = converted(recipe, device, dtype)
    hold_scales(model, device)
    norm = getattr(nn, name)(96, eps=1e-5, dtype=dtype, device=device)
    norm.weight.data.uniform_(0.5, 1.5)
    x = (torch.randn(2, 20, 96, device=device) * 3).to(dtype).requires_grad_()
    dy = torch.randn(2, 20, 64, device=device).to(dtype)
    inputs = [x, *norm.parameters(), *model.parameters()]
    fused = gradients(lambda: norm_linear(model[0], x, norm), inputs, dy)
    assert_alike(fused, gradients(lambda: model[0](norm(x)), inputs, dy), dtype)


@every_recipe
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    "name",
    # what each computes is in tests/kernels/test_producers.py
    ["silu", *(pytest.param(name, marks=pytest.mark.full) for name in ("gelu", "gelu_tanh"))],
)
def test_activation_linear(name, gated, recipe, device):
    model = converted(recipe, device, torch.float32)
    hold_scales(model, device)
    x = torch.randn(2, 20, 96, device=device, requires_grad=True)
    up = torch.randn(2, 20, 96, device=device, requires_grad=True) if gated else None
    dy = torch.randn(2, 20, 64, device=device)

    def unfused():
        y = {
            "silu": F.silu,
            "gelu": F.gelu,
            "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        }[name](x)
        return model[0](y if up is None else y * up)

    inputs = [t for t in (x, up, *model.parameters()) if t is not None]
    fused = gradients(lambda: activation_linear(model[0], x, name, up=up), inputs, dy)
    assert_alike(fused, gradients(unfused, inputs, dy), torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norm_linear_compiles_whole_and_gives_the_bits_of_the_norm_itself(name, recipe, device):
    model = converted(recipe, device, torch.bfloat16)
    norm = getattr(nn, name)(96, eps=1e-5, dtype=torch.bfloat16, device=device)
    norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(48, 96, device=device).bfloat16().requires_grad_()
    dy = torch.randn(48, 64, device=device).bfloat16()
    inputs = [x, *norm.parameters(), *model.parameters()]

    fused = norm_forward(type(norm), norm_form(norm))
    torch._dynamo.reset()
    compiled = torch.compile(lambda: model[0](fused(norm, x)), backend="aot_eager", fullgraph=True)
    plain = gradients(lambda: model[0](norm(x)), inputs, dy)
    for eager, traced in zip(plain, gradients(compiled, inputs, dy), strict=True):
        assert torch.equal(eager, traced)


def test_fused_forward_is_recorded(device):
    model = converted("delayed", device, torch.float32)
    norm = nn.RMSNorm(96, device=device)
    x = torch.randn(20, 96, device=device, requires_grad=True)
    norm_linear(model[0], x, norm).sum().backward()
    assert set(model[0].ledger.flops) == {(g, "fp8") for g in ("fprop", "dgrad", "wgrad")}
    assert bool((FP8State.of(model).delayed.amax_history[0] > 0).all())


def test_fused_keeps_no_normalised_copy(device):
    """Saved: the norm's input, which its backward needs anyway, and one byte an element for wgrad."""
    model = converted("current", device, torch.bfloat16)
    norm = nn.RMSNorm(96, device=device, dtype=torch.bfloat16)
    x = torch.randn(320, 96, device=device, dtype=torch.bfloat16, requires_grad=True)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        norm_linear(model[0], x, norm)
    own = {id(p.data_ptr()) for p in (*model.parameters(), *norm.parameters())}
    kept = sum(t.numel() * t.element_size() for p, t in saved.items() if p not in own and t.numel() >= 320)
    assert kept <= 320 * 96 * (2 + 1) + 320 * 4 + 64 * 96 * 2


class Site(nn.Module):
    """A block whose norm feeds one linear."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.proj = norm, nn.Linear(96, 64)

    def forward(self, x):
        return self.proj(self.norm(x))


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_a_norm_is_computed_in_the_linear_behind_it(name, recipe, device):
    torch.manual_seed(0)
    plain = nn.Sequential(Site(getattr(nn, name)(96, eps=1e-5))).to(device)
    plain[0].norm.weight.data.uniform_(0.5, 1.5)
    fused = copy.deepcopy(plain)
    foundry_fp8.apply_fp8(plain, recipe=recipe, backend="native", fuse=False)
    report = foundry_fp8.apply_fp8(fused, recipe=recipe, backend="native")
    assert report.fused == ("0.norm",)
    assert list(fused.state_dict()) == list(plain.state_dict())
    x = (torch.randn(2, 16, 96, device=device) * 3).requires_grad_()
    dy = torch.randn(2, 16, 64, device=device)
    calls = CountOps()
    with calls:
        ours = gradients(lambda: fused(x), [x, *fused.parameters()], dy)
    assert (
        "norm_statistics" in calls.calls and "norm_backward" in calls.calls and "produce" not in calls.calls
    )
    assert_alike(ours, gradients(lambda: plain(x), [x, *plain.parameters()], dy), torch.float32)
    assert fused[0].proj.ledger.flops == plain[0].proj.ledger.flops

    seen = []
    fused[0].proj.probe = lambda operand, hp, q: seen.append((operand, hp))
    fused(x)
    torch.testing.assert_close(
        dict(seen)["x"], plain[0].norm(x).detach().reshape(32, 96), rtol=1e-5, atol=1e-5
    )


def test_small_layers_stay_in_high_precision_under_auto(device):
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 8192), nn.Linear(8192, 1024)).to("meta")
    report = foundry_fp8.apply_fp8(model, backend="native", device=device)
    assert report.converted == ["2"]
    assert all("too small to gain" in reason for reason in report.skipped.values())
