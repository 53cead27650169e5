"""Linears with an output multiplier under the recipe ``unit``, against float64 products of independently cast operands."""

from collections import Counter

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.unit_linear import FP8UnitLinear, UnitLinear
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.quantize import quantize_constant
from foundry_fp8.numerics.recipes import CurrentScaling, UnitScaling
from foundry_fp8.observe.operand_health import measure
from foundry_fp8.surgery.apply import apply_fp8

S = 2**20
UNIT = {"name": "unit", "gradient_scale": S}
every_backend = pytest.mark.parametrize("backend", ["emulated", "native"])
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


def convert(backend, recipe=UNIT, k=96, n=160, dtype=torch.float32, device="cpu", **options):
    model = nn.Sequential(UnitLinear(k, n, dtype=dtype, device=device))
    apply_fp8(model, recipe=recipe, backend=backend, **options)
    return model


def cast(x, fmt, scale=1.0):
    """``ml_dtypes``' values after clipping, in float64."""
    clipped = np.clip(x.detach().cpu().double().numpy() * scale, -fmt.max, fmt.max)
    return torch.from_numpy(clipped.astype(np.float32).astype(NUMPY[fmt]).astype(np.float64)) / scale


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [64, 33])
def test_three_gemms_match_float64_with_one_alpha(backend, dtype, tokens, device):
    model = convert(backend, dtype=dtype, device=device)
    x = (torch.randn(tokens, 96) * 2).to(dtype).to(device)
    x[0, 0] = 1000.0  # clipped
    x.requires_grad_()
    dy = (torch.randn(tokens, 160) / S).to(dtype).to(device)
    dy[1, 1] = 1.0  # clipped
    y = model(x)
    y.backward(dy)
    qx, qw, qdy = cast(x, E4M3), cast(model[0].weight, E4M3), cast(dy, E5M2, S)
    assert qx[0, 0] == 448 and qdy[1, 1] == 57344 / S
    alpha = 96**-0.5
    for ours, exact in (
        (y, alpha * qx @ qw.t()),
        (x.grad, alpha * qdy @ qw),
        (model[0].weight.grad, alpha * qdy.t() @ qx),
    ):
        error = (ours.detach().cpu().double() - exact).abs()
        rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
        # float32 sums: relative to the largest that a row may pass through
        assert bool((error <= exact.abs() * rounding + exact.abs().max() * 1e-5).all())


@every_backend
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_stay_visible_without_an_amax(backend, value, device):
    model = convert(backend, device=device)
    x, dy = torch.randn(64, 96, device=device), torch.randn(64, 160, device=device) / S
    poisoned = x.clone()
    poisoned[3, 5] = value
    y = model(poisoned)
    assert y[3].isnan().all() and y[:3].isfinite().all()
    x.requires_grad_()
    dy[2, 7] = value
    model(x).backward(dy)
    assert x.grad[2].isnan().all() and x.grad[3:].isfinite().all()
    assert model[0].weight.grad[7].isnan().all()


def test_nothing_is_measured_and_nothing_is_kept(device):
    """The kernel writes its constants; the reference names an amax of 0, and a monitor is shown the real one."""
    model = convert("native", device=device)
    shown = {}
    model[0].probe = lambda operand, x, q: shown.setdefault(operand, (x, q))
    model(torch.randn(64, 96, device=device)).backward(torch.randn(64, 160, device=device) / S)
    assert set(shown) == {"x", "w", "dy"}
    for operand, (x, q) in shown.items():
        assert float(q.scale_inv) == (1 / S if operand == "dy" else 1.0)
        assert float(measure(x, q)[0]) == float(x.abs().max())
    assert float(quantize_constant(torch.randn(4, 4), 1.0, E4M3).amax) == 0


def test_the_kernel_is_the_reference_bit_for_bit(device):
    from foundry_fp8.kernels.producers import Producer
    from foundry_fp8.kernels.tensorwise import quantize_tensorwise, quantize_tensorwise_reference
    from tests.kernels.cases import DTYPES, assert_same_bits, poisoned, spread

    for dtype in DTYPES:
        for fmt, scale in ((E4M3, 1.0), (E5M2, 2.0**24)):
            x = poisoned(spread(70, 96, dtype, device), float("inf"), float("nan"))
            pair = [
                f(Producer.identity(x), fmt, constant=scale, alpha=0.125, column_sum=True)
                for f in (quantize_tensorwise, quantize_tensorwise_reference)
            ]
            for name in ("data", "data_t", "stats"):
                assert_same_bits(getattr(pair[0], name), getattr(pair[1], name), name)
            assert pair[0].stats.tolist() == [0.0, 0.125 / scale, 1 / scale]


def test_one_launch_a_pass_where_current_scaling_needs_two(device, monkeypatch):
    from foundry_fp8.kernels.launch import Launch

    passes, call = [], Launch.__call__

    def seen(self, *args):
        passes.append(self.name)
        call(self, *args)

    monkeypatch.setattr(Launch, "__call__", seen)
    other = nn.Sequential(nn.Linear(96, 160, bias=False, device=device))
    apply_fp8(other, recipe="current", backend="native")
    counts = {}
    for name, model in (("unit", convert("native", device=device)), ("current", other)):
        passes.clear()
        x = torch.randn(64, 96, device=device, requires_grad=True)
        model(x).backward(torch.randn(64, 160, device=device) / S)
        counts[name] = Counter(passes)
    # x with w, and dy with w once more, whose amax current scaling still knows.
    assert counts["unit"] == {"_quantize_together_kernel": 2}
    assert counts["current"] == {
        "_amax_together_kernel": 1,
        "_amax_kernel": 1,
        "_quantize_together_kernel": 2,
    }


@every_backend
def test_wgrad_in_high_precision_has_alpha_too(backend, device):
    model = convert(backend, wgrad="high_precision", device=device)
    x, dy = torch.randn(64, 96, device=device), torch.randn(64, 160, device=device)
    model(x).backward(dy)
    torch.testing.assert_close(model[0].weight.grad, dy.t() @ x * 96**-0.5)


def test_cached_weights_give_the_same_bits(device):
    plain, cached = convert("native", device=device), convert("native", cache_weights=True, device=device)
    cached.load_state_dict(plain.state_dict())
    x, dy = torch.randn(64, 96, device=device), torch.randn(64, 160, device=device) / S
    for _ in range(2):
        for model in (plain, cached):
            model(x).backward(dy)
    assert torch.equal(plain[0].weight.grad, cached[0].weight.grad)


def test_high_precision_is_the_layer_that_it_was():
    layer = UnitLinear(64, 32)
    x = torch.randn(8, 64)
    assert "output_multiplier=0.125" in repr(layer)
    expected = layer(x)
    torch.testing.assert_close(expected, x @ layer.weight.t() / 8)
    model = nn.Sequential(layer)
    apply_fp8(model, recipe=UNIT)
    assert isinstance(model[0], FP8UnitLinear)
    assert torch.equal(model.eval()(x), expected)
    model.train()[0].set_recipe(None)
    assert torch.equal(model(x), expected)


def test_the_recipe_and_the_layers_belong_together():
    with pytest.raises(
        ConfigError, match=r"no linear layer was converted.*need layers with µnit Scaling's output"
    ):
        apply_fp8(nn.Sequential(nn.Linear(64, 32)), recipe="unit")
    with pytest.raises(ConfigError, match=r"no linear layer was converted.*only recipe: unit gives"):
        apply_fp8(nn.Sequential(UnitLinear(64, 32)), recipe="current")
    report = apply_fp8(nn.Sequential(UnitLinear(64, 32), nn.Linear(32, 32)), recipe="unit")
    assert report.converted == ["0"] and "output multiplier" in report.skipped["1"]
    with pytest.raises(RuntimeError, match=r"^0: it has µnit Scaling's output multiplier.*current"):
        convert("emulated")[0].set_recipe(CurrentScaling())
    with pytest.raises(ValueError, match="no bias"):
        UnitLinear(8, 8, bias=True)
    with pytest.raises(ConfigError, match=r"gradient_scale.*power of two"):
        convert("emulated", {"name": "unit", "gradient_scale": 3})


def test_an_automatic_gradient_scale_is_chosen_before_anything_trains():
    model = convert("emulated", "unit")
    x = torch.randn(16, 96)
    with pytest.raises(RuntimeError, match=r"gradient_scale: auto is set from the first batch"):
        model(x)
    with torch.no_grad():
        model(x)
    model[0].set_recipe(None)
    model[0].choose_gradient_scale(UnitScaling.gradient_scale_for(4096, 256))
    model[0].set_recipe(UnitScaling())  # as a guard promotes a layer
    assert model[0].recipe.gradient_scale == 2**20
    model(x).sum().backward()


def test_the_layer_keeps_unit_variance_both_ways():
    layer = UnitLinear(512, 512)
    x = torch.randn(2048, 512, requires_grad=True)
    y = layer(x)
    y.backward(torch.randn(2048, 512))
    assert layer.weight.detach().std() == pytest.approx(1, rel=0.01)
    assert y.detach().std() == pytest.approx(1, rel=0.02) and x.grad.std() == pytest.approx(1, rel=0.02)
