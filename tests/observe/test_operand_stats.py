"""One pass over an operand against float64, and what only the flattened moments and the largest value see."""

from __future__ import annotations

import math

import pytest
import torch

from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.quantize import (
    amax_of,
    quantize_block,
    quantize_mx,
    quantize_tensor,
    scale_from_amax,
)
from foundry_fp8.observe.operand_health import SHARED, measure, outliers, summarise
from foundry_fp8.observe.operand_stats import SAMPLE, moments, rounding_noise, sample_rows


def tensorwise(x, fmt=E4M3):
    return quantize_tensor(x, scale_from_amax(amax_of(x), fmt), fmt)


QUANTISE = {
    "tensor": tensorwise,
    "rows": lambda x: quantize_block(x, (1, 128), E4M3),
    "square": lambda x: quantize_block(x, (128, 128), E4M3),
    "mx": lambda x: quantize_mx(x, (1, 32), E4M3),
}


def by_definition(x, q):
    wide = x.double()
    error = (wide - q.data.double() * q.expanded(q.scale_inv).double()).square()
    s2, s4 = wide.square(), wide.square().square()
    ratio = error.sum(1) / s2.sum(1)
    return {
        "noise": float(ratio.mean()) / rounding_noise(q.fmt),
        "kurtosis": float((s4.mean(1) / s2.mean(1).square()).mean()),
        "kurtosis_flat": float(s4.mean() / s2.mean().square()),
        "peak": float(wide.abs().max() / s2.mean().sqrt()),
        "sqnr_db": 10 * math.log10(float(s2.sum() / error.sum())),
        "flushed": float((q.data.float().eq(0) & x.ne(0)).double().mean()),
    }


@pytest.mark.parametrize("kind", QUANTISE)
@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_all_figures_of_a_small_tensor_against_float64(kind, size):
    torch.manual_seed(0)
    x = torch.randn(120, 256) * torch.logspace(-2, 2, 120)[:, None] * size
    q = QUANTISE[kind](x)
    got = summarise(measure(x, q).tolist())
    for name, wanted in by_definition(x, q).items():
        assert getattr(got, name) == pytest.approx(wanted, rel=1e-4, abs=1e-9), name


@pytest.mark.parametrize("kind", QUANTISE)
def test_a_sample_of_a_large_tensor_is_near_the_whole(kind):
    torch.manual_seed(0)
    x = torch.randn(12 * SAMPLE, 256) * (1 + torch.arange(12 * SAMPLE) % 7)[:, None]
    q = QUANTISE[kind](x)
    got, wanted = summarise(measure(x, q).tolist()), by_definition(x, q)
    for name in ("noise", "kurtosis", "kurtosis_flat", "peak"):
        assert getattr(got, name) == pytest.approx(wanted[name], rel=0.1), name
    assert got.sqnr_db == pytest.approx(wanted["sqnr_db"], abs=0.5)


@pytest.mark.parametrize("rows", [256, 4096])
def test_an_outlier_in_one_token_is_seen_flattened_and_by_its_size_and_not_by_the_mean_over_tokens(rows):
    torch.manual_seed(0)
    x = torch.randn(rows, 128)
    before = outliers(moments(x, sample_rows(x)).tolist())
    x[rows // 3] *= 200
    kurtosis, flat, peak = outliers(moments(x, sample_rows(x)).tolist())
    assert kurtosis == pytest.approx(before[0], rel=0.05)
    assert flat > 20 * before[1]
    assert peak > 3 * before[2]


def test_the_tokens_beside_an_outlier_are_lost_to_noise_where_the_sqnr_sees_none():
    torch.manual_seed(0)
    x = torch.randn(512, 128)
    x[100] *= 1e6
    got = summarise(measure(x, tensorwise(x)).tolist())
    assert got.sqnr_db > 25
    assert got.noise > 0.9 / rounding_noise(E4M3)
    assert got.flushed > 0.9


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_noise_is_about_one_where_rounding_is_all_there_is(fmt):
    torch.manual_seed(0)
    x = torch.randn(512, 512)
    assert summarise(measure(x, tensorwise(x, fmt)).tolist()).noise == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_a_large_channel_that_is_the_same_on_all_tokens_hides_no_noise(size):
    """Its rounding is 3 % of it, which is more than tokens differ in."""
    torch.manual_seed(0)
    x = torch.randn(300, 128)
    x[:, 7] += 1000
    q = tensorwise(x * size)
    got = summarise(measure(x * size, q).tolist())
    error = (x.double() - q.data.double() * q.scale_inv.double() / size).square().sum(1)
    varies = (x.double() - x.double().mean(0)).square().sum(1)
    assert got.noise == pytest.approx(float((error / varies.mean()).mean()) / rounding_noise(E4M3), rel=0.2)
    assert got.noise > 50
    x[:, 7] = 1000 * torch.randn(300)  # what tokens differ in
    assert summarise(measure(x, tensorwise(x)).tolist()).noise < 2


@pytest.mark.parametrize("size", [1.0, 1e-12])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_mean_of_all_channels_hides_no_noise(size, sign):
    """Nothing sticks out and each element is rounded as well as ever, but tokens differ in less than a step."""
    torch.manual_seed(0)
    x = torch.randn(400, 128) + 40 * sign * torch.rand(128)
    q = tensorwise(x * size)
    got = summarise(measure(x * size, q).tolist())
    error = (x.double() - q.data.double() * q.scale_inv.double() / size).square().sum(1)
    varies = (x.double() - x.double().mean(0)).square().sum(1) / SHARED
    assert got.noise == pytest.approx(float((error / varies.mean()).mean()) / rounding_noise(E4M3), rel=0.2)
    assert got.noise > 50


@pytest.mark.parametrize("mean", [0.5, 1.0, 1.5])
def test_a_mean_that_leaves_a_quarter_of_the_energy_counts_nothing(mean):
    torch.manual_seed(0)
    x = torch.randn(400, 128) + mean
    assert summarise(measure(x, tensorwise(x)).tolist()).noise < 1.5


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_mean_of_few_rows_is_no_mean_of_all(rows):
    torch.manual_seed(0)
    x = torch.randn(rows, 512)
    assert summarise(measure(x, tensorwise(x)).tolist()).noise < 1.5


def test_many_equal_tokens_are_no_constant_channel():
    """Padding: most rows are one row."""
    torch.manual_seed(0)
    x = torch.randn(1, 128).repeat(400, 1)
    x[:40] = torch.randn(40, 128)
    assert summarise(measure(x, tensorwise(x)).tolist()).noise < 1.5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible_wherever_it_is(bad):
    x = torch.randn(8 * SAMPLE, 32)
    x[777, 5] = bad
    got = summarise(measure(x, tensorwise(x)).tolist())
    assert not math.isfinite(got.noise) and math.isnan(got.sqnr_db)
    assert not math.isfinite(got.kurtosis_flat)


def test_zeros_and_bfloat16():
    zeros = torch.zeros(300, 16, dtype=torch.bfloat16)
    got = summarise(measure(zeros, tensorwise(zeros)).tolist())
    assert (got.noise, got.kurtosis, got.kurtosis_flat, got.peak, got.flushed) == (0, 0, 0, 0, 0)
