"""Hopper's accumulation against a second model of it, one output at a time in exact fractions, and against published figures."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.backends.emulated.gemm import scaled_mm
from foundry_fp8.backends.emulated.hopper import hopper_mm
from foundry_fp8.backends.emulated.quantizers import quantize_operand
from foundry_fp8.config import ConfigError
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling


def quantized(fmt, rows, k, spread):
    """FP8 values over many binades, subnormals and zeros among them."""
    x = torch.randn(rows, k) * torch.exp2(torch.randint(-spread, spread + 1, (rows, k)).float())
    data = x.clamp(-fmt.max, fmt.max).to(fmt.dtype)
    one = torch.ones(())
    return Quantized(data, one, None, fmt, one)


def exponent(x, least):
    """floor(log2 |x|), at least that of the least normal number."""
    return max(math.frexp(x)[1] - 1, least)


def toward_zero(x, unit):
    return int(x / unit) * unit  # int() of a Fraction cuts the fraction off


def one_output(a, b, least, interval):
    """A sum of products as the instruction makes it, by fractions; every ``interval`` elements added to a float32."""
    total = torch.zeros(())
    for first in range(0, len(a), interval):
        accumulator = Fraction(0)
        for start in range(first, min(first + interval, len(a)), 32):
            stop = min(start + 32, first + interval)
            pairs = [(x, y) for x, y in zip(a[start:stop], b[start:stop], strict=True) if x and y]
            exponents = [exponent(x, least[0]) + exponent(y, least[1]) for x, y in pairs]
            terms = [Fraction(x) * Fraction(y) for x, y in pairs]
            if accumulator:
                exponents.append(math.frexp(float(accumulator))[1] - 1)
                terms.append(accumulator)
            if not terms:
                continue
            unit = Fraction(2) ** (max(exponents) - 13)
            accumulator = sum(toward_zero(term, unit) for term in terms)
            if accumulator:
                accumulator = toward_zero(
                    accumulator, Fraction(2) ** (math.frexp(float(accumulator))[1] - 1 - 13)
                )
        total = total + torch.tensor(float(accumulator))
    return total.item()


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "precise"])
@pytest.mark.parametrize("spread", [1, 12])
@pytest.mark.parametrize("k", [32, 352])
def test_it_equals_a_model_in_fractions_bit_for_bit(formats, fast, spread, k):
    a, b = quantized(formats[0], 6, k, spread), quantized(formats[1], 5, k, spread)
    ours = hopper_mm(a, b, fast=fast)
    least = tuple(round(math.log2(fmt.min_normal)) for fmt in formats)
    rows, columns = a.data.float().tolist(), b.data.float().tolist()
    expected = [[one_output(row, column, least, k if fast else 128) for column in columns] for row in rows]
    assert torch.equal(ours, torch.tensor(expected))


def test_block_scales_are_applied_at_each_promotion():
    """Each 128 elements are a sum of their own, so that splitting K there and adding in float32 gives the same."""
    recipe = BlockScaling(power_2_scales=False)
    x, w = torch.randn(9, 288), torch.randn(130, 288)
    a, b = quantize_operand(x, "x", recipe, along=1), quantize_operand(w, "w", recipe, along=1)
    expected = torch.zeros(9, 130)
    for block, first in enumerate(range(0, 288, 128)):
        columns = slice(first, first + 128)
        part = hopper_mm(
            Quantized(a.data[:, columns], torch.ones(()), None, a.fmt, torch.ones(())),
            Quantized(b.data[:, columns], torch.ones(()), None, b.fmt, torch.ones(())),
            fast=True,
        )
        rows = b.scale_inv[:, block].repeat_interleave(128)[:130]
        expected += part * (a.scale_inv[:, block, None] * rows)
    assert torch.equal(hopper_mm(a, b, fast=False), expected)


@pytest.mark.parametrize("k, fast, precise", [(1024, 0.013, 0.0007), (4096, 0.066, 0.0007)])
def test_sums_of_one_sign_come_out_low_and_promotion_mends_it(k, fast, precise):
    """The fast figures are those of uniform data; DeepSeek-V3 (section 3.3.2) found "nearly 2%" at most for K=4096 there."""
    a, b = (torch.rand(48, k).to(torch.float8_e4m3fn) for _ in range(2))
    a, b = (Quantized(x, torch.ones(()), None, E4M3, torch.ones(())) for x in (a, b))
    exact = a.data.double() @ b.data.double().t()
    low = {mode: ((exact - hopper_mm(a, b, fast=mode)) / exact).mean().item() for mode in (True, False)}
    assert low[True] == pytest.approx(fast, rel=0.1)
    assert 0 < low[False] < precise


@pytest.mark.parametrize("sums", ["hopper_fast", "hopper_precise"])
def test_what_is_not_finite_stays_so(sums):
    for value in (torch.nan, torch.inf):
        x, w = torch.randn(4, 64), torch.randn(16, 64)
        x[1, 3] = value
        a, b = (
            quantize_operand(t, operand, CurrentScaling(), along=1) for t, operand in ((x, "x"), (w, "w"))
        )
        y = scaled_mm(a, b, out_dtype=torch.float32, power_2=True, sums=sums)
        assert not y[1].isfinite().any()


def trained(recipe, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 64, bias=False))
    model[0].weight.data.abs_()
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated", **options)
    x, dy = torch.rand(512, 512, requires_grad=True), torch.rand(512, 64)
    y = model(x)
    y.backward(dy)
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": model[0].weight.grad}


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("fast", [(), ("fprop",), ("dgrad", "wgrad")], ids=str)
def test_the_recipe_says_which_gemms_accumulate_fast(recipe, fast):
    """On sums of one sign: fast ones are low by far more than precise ones, whichever GEMM it is."""
    if recipe == "block":
        fast = ()
        named = recipe
    else:
        named = {"name": recipe, "fast_accumulation": list(fast)}
    plain, hopper = trained(named), trained(named, accumulation="hopper")
    for gemm in plain:
        low = ((plain[gemm] - hopper[gemm]) / plain[gemm]).mean().item()
        if gemm == "dgrad":  # contracts over 64 elements alone
            assert not torch.equal(plain[gemm], hopper[gemm])
        elif gemm in fast:
            assert low > 0.002
        else:
            assert 0 < low < 0.0008


def test_accumulation_is_not_for_mxfp8_and_its_name_is_checked():
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(RuntimeError, match="accumulation: hopper is that of GPUs which cannot run mxfp8"):
        foundry_fp8.apply_fp8(model, accumulation="hopper", recipe="mxfp8")
    assert type(model[0]) is nn.Linear
    with pytest.raises(ConfigError, match=r"accumulation: 'hoper'.*Did you mean 'hopper'"):
        foundry_fp8.apply_fp8(nn.Sequential(nn.Linear(64, 64)), accumulation="hoper")
    report = foundry_fp8.apply_fp8(nn.Sequential(nn.Linear(64, 64)), recipe="current", accumulation="hopper")
    assert "as Hopper does" in report.chosen
