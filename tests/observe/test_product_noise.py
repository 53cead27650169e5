"""The error of a linear's products on some rows against the whole in float64, where each operand is rounded as well as ever."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.quantize import amax_of, quantize_tensor, scale_from_amax
from foundry_fp8.observe import operand_health
from foundry_fp8.observe.operand_health import HealthProbe, Products, Seen, summarise
from foundry_fp8.observe.operand_stats import rounding_noise
from foundry_fp8.observe.product_noise import FEW, LEFT, _gram_schmidt, product_noise
from foundry_fp8.surgery.apply import apply_fp8

RECIPES = ["delayed", "current", "block", "mxfp8"]
TOKENS, INTO, OUT = 192, 160, 128


def healthy():
    return torch.randn(TOKENS, INTO), torch.randn(OUT, INTO) / INTO**0.5, torch.randn(TOKENS, OUT)


def singular_value():
    """x is orthogonal to the one direction that has grown, so that the product is as small as ever."""
    x, w, dy = healthy()
    right, left = torch.sign(torch.randn(INTO)), torch.sign(torch.randn(OUT))
    w += 4 * torch.outer(left, right)
    x -= torch.outer(x @ right, right) / INTO
    dy -= torch.outer(dy @ left, left) / OUT
    return x, w, dy


def taken_off():
    """As before, but something behind the GEMM takes off what the direction brings."""
    x, w, dy = healthy()
    return x, w + 4 * torch.outer(torch.sign(torch.randn(OUT)), torch.sign(torch.randn(INTO))), dy


def sheared():
    """Half of x has the other half added, half of w has it taken off."""
    x, w, dy = healthy()
    half = INTO // 2
    x[:, :half] += 40 * x[:, half:]
    w[:, half:] -= 40 * w[:, :half]
    return x, w, dy


def means():
    """All that is multiplied moves by a mean."""
    x, w, dy = healthy()
    return x + 60, w, dy + 60


def several():
    """Tokens move along a curve of their place: directions that all share, no mean; what reads it takes it off."""
    x, w, dy = healthy()
    angle = 2 * math.pi * torch.arange(TOKENS) / 32
    circle = torch.stack([angle.cos(), angle.sin(), (2 * angle).cos()], 1)
    return x + 20 * circle @ torch.sign(torch.randn(3, INTO)), w, dy


def opposite():
    """Tokens come in pairs that are alike, and whose gradients nearly cancel."""
    x, w, dy = healthy()
    push = 30 * torch.randn(TOKENS // 2, OUT)
    return x[: TOKENS // 2].repeat(2, 1), w, dy + torch.cat([push, -push])


def seen(operands, recipe, size=1.0, dtype=torch.float32):
    """By product what is measured of one pass; by operand the noise of each; the operands as they are multiplied."""
    torch.manual_seed(0)
    x, w, dy = (part.to(dtype) for part in operands())
    dy = dy * size
    model = torch.nn.Sequential(torch.nn.Linear(INTO, OUT, dtype=dtype))
    model[0].weight.data, model[0].bias.data = w, torch.full((OUT,), 100.0, dtype=dtype)
    apply_fp8(model.train(), recipe=recipe, backend="emulated")
    products = Products()
    probe = HealthProbe(model, lambda hook: hook, products=products)
    for _ in range(3):  # delayed scaling knows the amaxes then
        x.grad = None
        probe.attach()
        probe.tensors(), products.tensors()
        model(x.requires_grad_()).backward(dy)
        probe.detach()
    noise = {which: product_noise(row.tolist()) for (_, which), row in products.tensors().items()}
    of = {operand: summarise(row.tolist()).noise for (_, operand), row in probe.tensors().items()}
    return noise, of, model


def by_definition(operands, recipe, which):
    """Of all tokens and all channels: what the layer itself puts out, against float64."""
    torch.manual_seed(0)
    x, w, dy = operands()
    _, _, model = seen(operands, recipe)
    model.zero_grad()
    x.requires_grad_()
    found = model(x) - 100
    found.backward(dy)
    a, b = {"y": (x.detach(), w.t()), "dx": (dy, w), "dw": (dy.t(), x.detach())}[which]
    exact = a.double() @ b.double()
    error = {"y": found.detach(), "dx": x.grad, "dw": model[0].weight.grad}[which].double() - exact
    size = exact.norm(dim=1, keepdim=True)
    error = error / torch.maximum(size, error.norm(dim=1, keepdim=True))
    left = torch.linalg.svdvals(exact / size).square()
    content = (
        left.sum()
        if which == "dw"
        else min(left.sum(), *(left[k:].sum() / share for k, share in enumerate(LEFT, 1)))
    )
    return float((error.square().sum() / content).clamp(max=1))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("operands", [healthy, singular_value, taken_off, sheared, means, several])
@pytest.mark.parametrize("which", ["y", "dx"])
def test_a_sample_of_a_product_is_near_the_whole(operands, recipe, which):
    noise, _, model = seen(operands, recipe)
    runs, operand = model[0].recipe, {"y": "x", "dx": "dy"}[which]
    rounding = rounding_noise(runs.format(operand)) + rounding_noise(runs.format("w"))
    # Of dx 16 columns of 160 are looked at, and 129 of 192 tokens.
    near = {"y": 0.3, "dx": 0.5}[which]
    assert noise[which] == pytest.approx(by_definition(operands, recipe, which) / rounding, rel=near)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("operands", [healthy, opposite])
def test_a_sample_of_the_sum_over_tokens_is_near_the_whole(operands, recipe):
    noise, _, model = seen(operands, recipe)
    runs = model[0].recipe
    rounding = rounding_noise(runs.format("dy")) + rounding_noise(runs.format("x"))
    # 16 columns of 128 and of 160 are looked at.
    assert noise["dw"] == pytest.approx(by_definition(operands, recipe, "dw") / rounding, rel=0.35)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_that_cancels_nothing_has_what_rounding_makes(recipe):
    noise, _, _ = seen(healthy, recipe)
    assert noise == {which: pytest.approx(1, abs=0.3) for which in ("y", "dx", "dw")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_tokens_that_cancel_are_lost_in_their_sum_alone(recipe):
    noise, of, _ = seen(opposite, recipe)
    assert max(of.values()) < 1.6, "each is rounded as well as ever"
    assert noise["y"] < 1.5 and noise["dx"] < 1.5 and noise["dw"] > 100


@pytest.mark.parametrize("recipe", RECIPES)
def test_several_directions_that_all_tokens_share_are_no_content(recipe):
    noise, of, _ = seen(several, recipe)
    assert max(of.values()) < 1.6, "their mean is no more than ever"
    assert noise["y"] > 30 and noise["dx"] < 1.5


def test_a_weight_gradient_that_fp8_does_not_make_is_not_looked_at():
    def measured(**options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(INTO, OUT))
        apply_fp8(model.train(), recipe="current", backend="emulated", **options)
        products = Products()
        probe = HealthProbe(model, lambda hook: hook, products=products)
        probe.attach()
        model(torch.randn(TOKENS, INTO, requires_grad=True)).backward(torch.randn(TOKENS, OUT))
        return {which for _, which in products.tensors()}

    assert measured() == {"y", "dx", "dw"}
    assert measured(wgrad="high_precision") == {"y", "dx"}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("operands", [singular_value, taken_off, sheared])
def test_what_no_operand_shows_is_seen_in_the_product(operands, recipe):
    noise, of, _ = seen(operands, recipe)
    assert max(of.values()) < 1.6, "each is rounded as well as ever"
    assert noise["y"] > 30
    if operands is not sheared:
        assert noise["dx"] > 10


@pytest.mark.parametrize("size", [1e-25, 1e12])
def test_gradients_of_any_size(size):
    assert seen(healthy, "current", size)[0]["dx"] == pytest.approx(
        seen(healthy, "current")[0]["dx"], rel=1e-3
    )


@pytest.mark.parametrize("operands", [healthy, sheared])
def test_bfloat16_is_measured_as_float32_is(operands):
    wanted = seen(operands, "current")[0]
    for which, noise in seen(operands, "current", dtype=torch.bfloat16)[0].items():
        assert noise == pytest.approx(wanted[which], rel=0.15), which


def test_one_token_that_cancels_is_one_of_many():
    def operands():
        x, w, dy = healthy()
        x[7] = torch.linalg.svd(w)[2][-1] * 1000
        return x, w, dy

    # In the sample a token stands for 1.5, and the largest once more for itself.
    assert seen(operands, "mxfp8")[0]["y"] < 1.5 + 2.5 / TOKENS / (2 * rounding_noise(E4M3))


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_that_are_lost_beside_an_outlier_that_no_weight_reads_are_seen(recipe):
    """They count as much as the others, though what is read of them is a small part of each."""

    def operands():
        x, w, dy = healthy()
        w[:, 7], w[11] = 0, 0
        x[5::16, 7] = dy[5::16, 11] = 1e12
        return x, w, dy

    noise = seen(operands, recipe)[0]
    share = {"block": 127 / INTO, "mxfp8": 31 / INTO}.get(
        recipe, 1
    )  # of what a row or a tensor has in the outlier's block
    tokens = 1 if recipe in ("delayed", "current") else 1 / 16
    assert noise["y"] > 0.6 * share * tokens / (2 * rounding_noise(E4M3))
    assert noise["dx"] > 0.4 * share * tokens / (rounding_noise(E4M3) + rounding_noise(E5M2))


def test_of_few_tokens_that_are_alike_no_direction_is_left_out():
    def operands():
        x, w, dy = healthy()
        return x[:1] + 0.1 * x[1:FEW], w, dy[:1] + 0.1 * dy[1:FEW]

    noise = seen(operands, "current")[0]
    assert noise["y"] < 1.5 and noise["dx"] < 1.5


@pytest.mark.parametrize("part", [slice(5, None), (slice(None), slice(1, None))])
def test_of_one_neuron_or_few_tokens_that_are_not_zero_nothing_else_is_lost(part):
    """Units of ReLU that have died."""

    def operands():
        x, w, dy = healthy()
        x[part], dy[part] = 0, 0
        return x, w, dy

    noise = seen(operands, "current")[0]
    assert noise["y"] < 3 and noise["dx"] < 3


@pytest.mark.parametrize("what", ["x", "w", "dy"])
def test_zeros_lose_nothing(what):
    def operands():
        x, w, dy = healthy()
        ({"x": x, "w": w, "dy": dy}[what]).zero_()
        return x, w, dy

    noise = seen(operands, "current")[0]
    assert noise[{"x": "y", "w": "y", "dy": "dx"}[what]] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_no_number(bad):
    def operands():
        x, w, dy = healthy()
        x[3, 5] = dy[3, 5] = bad
        return x, w, dy

    noise = seen(operands, "current")[0]
    assert math.isnan(noise["y"]) and math.isnan(noise["dx"])


@pytest.mark.parametrize("how", ["recompute", "reentrant", "autocast", "lora", "two_microbatches"])
def test_all_products_are_measured_once_however_the_layer_runs(how):
    """Of the first microbatch, of a recompute no second time, of frozen weights too."""
    torch.manual_seed(0)
    x, w, dy = sheared()
    model = torch.nn.Sequential(torch.nn.Linear(INTO, OUT))
    model[0].weight.data = w
    model[0].weight.requires_grad_(how != "lora")
    apply_fp8(model.train(), recipe="current", backend="emulated")
    products = Products()
    probe = HealthProbe(model, lambda hook: hook, products=products)
    probe.attach()
    x.requires_grad_()
    if how in ("recompute", "reentrant"):
        checkpoint(model, x, use_reentrant=how == "reentrant").backward(dy)
    elif how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.backward(dy.bfloat16())
    else:
        model(x).backward(dy)
    if how == "two_microbatches":
        model(torch.zeros_like(x)).backward(dy)
    noise = {which: product_noise(row.tolist()) for (_, which), row in products.tensors().items()}
    wanted = seen(sheared, "current")[0]
    assert wanted.keys() == {"y", "dx", "dw"}
    if how == "lora":  # nothing makes it
        del wanted["dw"]
    assert noise == {which: pytest.approx(value, rel=0.2) for which, value in wanted.items()}


def test_products_are_judged_together_as_each_alone(monkeypatch):
    """However many wait, of several shapes, and one is not finite."""

    def noise(together):
        monkeypatch.setattr(operand_health, "TOGETHER", together)
        torch.manual_seed(0)
        products = Products()
        for name, operands in enumerate((healthy, means, singular_value, several, healthy, opposite)):
            x, w, dy = operands()
            x, dy = (x[:50], dy[:50]) if name in (1, 4) else (x, dy)
            w[3] = math.nan if name == 2 else w[3]
            for operand, part, fmt in (("x", x, E4M3), ("w", w, E4M3), ("dy", dy, E5M2)):
                q = quantize_tensor(part, scale_from_amax(amax_of(part), fmt), fmt)
                products.take(str(name), operand, Seen(part, q), wgrad=name != 3)
        return {where: product_noise(row.tolist()) for where, row in products.tensors().items()}

    alone = noise(1)
    assert len(alone) == 17 and [w for w, value in alone.items() if math.isnan(value)] == [
        ("2", "y"),
        ("2", "dx"),
    ]
    for together in (2, 64):
        assert noise(together) == {
            w: pytest.approx(value, rel=1e-9, nan_ok=True) for w, value in alone.items()
        }


@pytest.mark.parametrize("spread", [0, 6, 12])
def test_gram_schmidt_is_a_qr(spread):
    """Of columns whose sizes, and how alike they are, differ by as many octaves of ten."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 40, 8, dtype=torch.float64, generator=generator)
    x = x * torch.logspace(0, -spread, 8, dtype=torch.float64) + x[..., :1]
    found, wanted = _gram_schmidt(x), torch.linalg.qr(x)[0]
    torch.testing.assert_close(
        found.mT @ found, torch.eye(8, dtype=torch.float64).expand(5, 8, 8), rtol=0, atol=1e-12
    )
    # Columns are as near as 10^-spread, and so is what rounding leaves of their directions.
    torch.testing.assert_close(found @ found.mT, wanted @ wanted.mT, rtol=0, atol=1e-13 * 10**spread)
