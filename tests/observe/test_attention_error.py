"""What rounding does to the logits and the output of an attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.numerics.formats import E4M3
from foundry_fp8.numerics.quantize import amax_of, quantize_tensor, scale_from_amax
from foundry_fp8.observe.attention_error import (
    HEADS,
    QUERIES,
    AttentionPart,
    Spots,
    logit_error,
    logit_noise,
    output_error,
    part_of,
)
from foundry_fp8.observe.operand_stats import rounding_noise, spread
from foundry_fp8.observe.product_noise import product_noise

MASKS = {
    "causal": AttentionMask(causal=True),
    "window": AttentionMask(causal=True, window=(5, None)),
    "padding": AttentionMask(key_padding=torch.arange(24).expand(3, -1) < torch.tensor([24, 20, 1])[:, None]),
    "documents": AttentionMask(causal=True, documents=(torch.arange(24) // 7).expand(3, -1)),
    "bias of heads": AttentionMask(
        causal=True, bias=torch.linspace(-2, 2, 4)[:, None, None] * torch.arange(24)
    ),
    "bias": AttentionMask(bias=torch.randn(3, 1, 24, 24, generator=torch.Generator().manual_seed(1))),
    "nothing": AttentionMask(bias=torch.arange(24)[:, None] > 3),
}


def rounded(x):
    return quantize_tensor(x, scale_from_amax(amax_of(x), E4M3), E4M3).dequantize().float()


def noise(part, q, k):
    exact = part.log_probabilities(part.q, part.k)
    return logit_noise(logit_error(exact, part.log_probabilities(q, k)).tolist())


@pytest.mark.parametrize("rules", MASKS)
@pytest.mark.parametrize("heads", [4, 32])
def test_a_part_is_of_torchs_attention(rules, heads):
    """Two heads of queries share one of keys; queries that see nothing have zeros; every one of few heads is looked at."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, heads, 24, 8, generator=generator)
    k, v = torch.randn(2, 3, heads // 2, 24, 8, generator=generator)
    mask = MASKS[rules]
    if heads != 4 and rules == "bias of heads":
        pytest.skip("of four heads")
    part = part_of(q, k, v, mask, 0.7, spots := Spots.spread(q))
    wanted = nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), mask.dense(24, 24, q.device, torch.float64), scale=0.7, enable_gqa=True
    )  # fmt: skip
    if rules == "nothing":
        wanted[:, :, :4] = 0.0
    rows = spread(24, QUERIES, q.device)[0]
    places = [
        next((i, h) for i in range(3) for h in range(heads) if torch.equal(q[i, h, rows], one))
        for one in part.q
    ]
    assert 0.9 * min(3 * heads, HEADS) < len(set(places)) == len(places) <= HEADS
    assert {head for _, head in places} == set(range(0, heads, max(1, heads // HEADS)))
    found = torch.stack([wanted[where] for where in places])[:, rows]
    p = part.log_probabilities(part.q, part.k).exp()
    torch.testing.assert_close(p @ part.v.double(), found, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(spots.take(wanted).double(), found)
    assert spots.of == 3 * heads * 24


@pytest.mark.parametrize("size", [1.0, 6.0])
def test_the_error_of_logits_is_the_measured_one(size):
    """Of probabilities that are nearly equal; no operand shows it."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 40, 64, 64, generator=generator).mul(0.15)
    q *= size
    part = AttentionPart(q, k, k, torch.zeros(1, 64, 64), 1.0)
    q8, k8 = rounded(q), rounded(k)
    error = (q8.double() @ k8.double().mT) - (q.double() @ k.double().mT)
    assert noise(part, q8, k8) == pytest.approx(float(error.std()), rel=0.15)
    assert noise(part, q8, k8) == pytest.approx(size * 0.008, rel=0.3)


def test_heads_that_parted_are_well():
    """Queries of each head are as large as its keys are small: an average over heads would see products that nobody makes."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 8, 16, 32, generator=generator)
    apart = torch.logspace(-1, 1, 8)[:, None, None]
    part = AttentionPart(q * apart, k / apart, k, torch.zeros(1, 16, 16), 32**-0.5)
    of_all = (part.q - rounded(part.q)).std() * part.k.std()
    assert noise(part, rounded(part.q), rounded(part.k)) < 0.1 < 0.3 < of_all


def test_what_all_keys_share_is_no_error():
    """It shifts all logits of a query, which a softmax does not feel."""
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 4, 16, 32, generator=generator)
    part = AttentionPart(q, k, k, torch.zeros(1, 16, 16), 1.0)
    assert noise(part, q, k + 3.0) < 1e-4 < 0.1 < noise(part, q, k + 3.0 * torch.randn_like(k))


def test_an_error_that_turns_attention_to_another_key_shows_however_sure_it_was():
    q = torch.ones(1, 1, 1)
    keys = torch.tensor([[[40.0], [10.0], [0.0]]])
    part = AttentionPart(q, keys, keys, torch.zeros(1, 1, 3), 1.0)
    turned = torch.tensor([[[10.0], [40.0], [0.0]]])
    assert noise(part, q, torch.tensor([[[30.0], [10.0], [0.0]]])) < 1e-3 and noise(part, q, turned) > 5


def test_queries_that_see_nothing_do_not_count_and_nan_stays():
    q = torch.ones(1, 2, 1)
    keys = torch.tensor([[[1.0], [2.0]]])
    blind = torch.tensor([[[0.0, 0.0], [-math.inf, -math.inf]]])
    part = AttentionPart(q, keys, keys, blind, 1.0)
    exact = part.log_probabilities(q, keys)
    wrong = part.log_probabilities(q, torch.tensor([[[1.0], [3.0]]]))
    p, p8 = (torch.tensor([1.0, more]).softmax(0) for more in (2.0, 3.0))
    divergence = float((p * (p / p8).log()).sum())
    assert logit_error(exact, wrong).tolist() == pytest.approx([divergence, 1.0])
    assert logit_noise([divergence, 1.0]) == pytest.approx(math.sqrt(2 * divergence))
    broken = part.log_probabilities(q * math.nan, keys)
    assert math.isnan(logit_noise(logit_error(exact, broken).tolist()))


def test_the_error_of_the_output_is_that_of_rounded_probabilities_and_values():
    """A key that takes all attention and whose value is zero flushes what the others say, though no operand sticks out."""
    generator = torch.Generator().manual_seed(3)
    v = torch.randn(2, 64, 16, generator=generator)
    v[:, 0] = 0.0
    logits = torch.randn(2, 5, 64, generator=generator)

    def noise_of(odds):
        more = math.log(odds) * (torch.arange(64) == 0)
        p = (logits + more).softmax(-1)
        p8 = quantize_tensor(p, torch.tensor(448.0), E4M3).dequantize()
        v8 = quantize_tensor(v, scale_from_amax(amax_of(v), E4M3), E4M3).dequantize()
        row = output_error(p, v, p8, v8, 2 * rounding_noise(E4M3)).tolist()
        o = p.double() @ v.double()
        wanted = ((p8.double() @ v8.double() - o).square().sum(-1) / o.square().sum(-1)).clamp_max(1.0)
        assert row[:2] == pytest.approx([float(wanted.sum()), 10], rel=1e-4)
        return product_noise(row)

    assert noise_of(1.0) == pytest.approx(1, abs=0.4)
    assert (
        noise_of(1e2) < 2
        and noise_of(1e6) > 64
        and noise_of(1e9) == pytest.approx(0.5 / rounding_noise(E4M3))
    )
    nothing = torch.zeros(2, 5, 64)
    assert output_error(nothing, v, nothing, v, 1e-3).tolist() == [0, 0, 1e-3]
    broken = torch.full_like(nothing, math.nan)
    assert math.isnan(product_noise(output_error(broken, v, broken, v, 1e-3).tolist()))
