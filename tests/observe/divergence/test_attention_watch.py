"""Attention's operands: seen in FP8 and out of it, on every host, without changing a bit; and the error of its logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.formats import E4M3
from foundry_fp8.numerics.quantize import amax_of, quantize_tensor, scale_from_amax
from foundry_fp8.observe.divergence.attention_watch import (
    HEADS,
    QUERIES,
    AttentionWatch,
    logit_noise,
    output_error,
    probabilities,
)
from foundry_fp8.observe.operand_health import measure, summarise
from foundry_fp8.observe.operand_stats import rounding_noise, spread
from foundry_fp8.observe.product_noise import product_noise
from foundry_fp8.surgery.apply import apply_fp8
from tests.callbacks.conftest import build_llama


class Plain(nn.Module):
    """Attention that calls torch's function itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def llama(implementation):
    model = build_llama(attn_implementation=implementation).train()
    return model, lambda: model(input_ids=torch.arange(32).view(2, 16) % 64).logits


def mpt():
    from llmfoundry.models.layers.attention import MultiheadAttention

    torch.manual_seed(0)
    module = MultiheadAttention(d_model=32, n_heads=4, attn_impl="torch").train()
    x = torch.randn(2, 16, 32)
    return module, lambda: module(x, is_causal=True)[0]


def plain():
    model, x = Plain().train(), torch.randn(2, 16, 32)
    return model, lambda: model(x)


HOSTS = {"sdpa": lambda: llama("sdpa"), "eager": lambda: llama("eager"), "torch": plain, "mpt": mpt}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_looking_sees_its_operands_in_fp8_and_out_of_it_and_changes_nothing(host, recipe):
    model, run = HOSTS[host]()
    apply_fp8(model, recipe=recipe, attention=True)
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.set_recipe(None)
    attentions = {n: m for n, m in model.named_modules() if isinstance(m, FP8DotProductAttention)}
    watch = AttentionWatch(lambda hook: hook)
    amax = {(name, operand): 3.0 for name in attentions for operand in ("q", "k", "v", "do")}
    for running in (True, False):
        configured = next(iter(attentions.values())).configured_recipe
        for module in attentions.values():
            module.set_recipe(configured if running else None)
        unseen = run()
        watch.attach({n: (m, None if running else configured) for n, m in attentions.items()}, amax)
        seen = run()
        seen.square().sum().backward()
        watch.detach()
        again = run()
        if not running:  # the scales of FP8 attention move on with every forward
            assert torch.equal(unseen, seen) and torch.equal(seen, again)
        found = watch.collect()
        assert found.keys() == attentions.keys()
        for looked in found.values():
            assert (looked.real if running else looked.shadow).keys() == {"q", "k", "v", "do"}
            assert not (looked.shadow if running else looked.real)
            assert looked.output.keys() == {"real" if running else "shadow"}
            assert 0.1 < product_noise(looked.output["real" if running else "shadow"].tolist()) < 10
            assert all(amax > 0 for amax in looked.amax.values())
    assert not watch.collect()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_gradient_of_the_output_is_what_attention_quantises_and_would_quantise(host, recipe):
    """An outlier channel flushes the rest of it, in FP8 and as a shadow; and it is the very tensor that the probe shows."""
    model, run = HOSTS[host]()
    apply_fp8(model, recipe={"name": recipe, "fp8_format": "e4m3"}, attention=True)
    name, attention = next((n, m) for n, m in model.named_modules() if isinstance(m, FP8DotProductAttention))
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.set_recipe(None)
    projection = next(m for n, m in model.named_modules() if n.endswith(("o_proj", "out_proj")) or n == "out")
    amax = {(name, "do"): 1e6}

    def look(outlier):
        def put(gradients):
            return (gradients[0] + outlier * (torch.arange(32) == 5),)

        def hook(module, args):
            if args[0].requires_grad:
                args[0].register_hook(lambda gradient: put((gradient,))[0])

        handle = projection.register_forward_pre_hook(hook)
        shown = {}
        attention.probe = lambda operand, x, q: shown.setdefault(operand, (x, q))
        for _ in range(2):  # delayed scaling knows the amax then
            shown.clear()
            watch = AttentionWatch(lambda hook: hook)
            watch.attach({name: (attention, configured)}, amax)
            run().square().sum().backward()
            watch.detach()
        handle.remove()
        return watch.collect()[name], shown

    configured = attention.configured_recipe
    looked, shown = look(1e6)
    assert looked.real["do"][0] == pytest.approx(1e6, rel=0.01)
    whole = summarise(measure(*shown["do"]).tolist())
    found = summarise(looked.real["do"].tolist())
    assert found.flushed == pytest.approx(whole.flushed, abs=0.01) and found.flushed > 0.3
    attention.set_recipe(None)
    shadow = summarise(look(1e6)[0].shadow["do"].tolist())
    assert shadow.flushed == pytest.approx(found.flushed, abs=0.05)
    assert summarise(look(0.0)[0].shadow["do"].tolist()).flushed > 0.3 or recipe == "current"


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


@pytest.mark.parametrize("rules", MASKS)
def test_probabilities_and_values_are_those_of_torchs_attention(rules):
    """Of one head of keys for two of queries; queries that see nothing have zeros."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, 4, 24, 8, generator=generator)
    k, v = torch.randn(2, 3, 2, 24, 8, generator=generator)
    mask = MASKS[rules]
    p, values = probabilities(q, k, v, mask, 0.7)
    wanted = nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), mask.dense(24, 24, q.device, torch.float64), scale=0.7, enable_gqa=True
    )  # fmt: skip
    if rules == "nothing":
        wanted[:, :, :4] = 0.0
    places, rows = (spread(count, n, q.device)[0] for count, n in ((12, HEADS), (24, QUERIES)))
    found = wanted.flatten(0, 1)[places][:, rows]
    assert p.shape == (HEADS, QUERIES, 24) and values.shape == (HEADS, 24, 8)
    torch.testing.assert_close((p @ values).double(), found, rtol=1e-5, atol=1e-6)


def test_the_error_of_the_output_is_that_of_rounded_probabilities_and_values():
    """A key that takes all attention and whose value is zero flushes what the others say, though no operand sticks out."""
    generator = torch.Generator().manual_seed(3)
    v = torch.randn(2, 64, 16, generator=generator)
    v[:, 0] = 0.0
    logits = torch.randn(2, 5, 64, generator=generator)

    def noise(odds):
        more = math.log(odds) * (torch.arange(64) == 0)
        p = (logits + more).softmax(-1)
        p8 = quantize_tensor(p, torch.tensor(448.0), E4M3).dequantize()
        v8 = quantize_tensor(v, scale_from_amax(amax_of(v), E4M3), E4M3).dequantize()
        row = output_error(p, v, p8, v8, 2 * rounding_noise(E4M3)).tolist()
        o = p.double() @ v.double()
        wanted = ((p8.double() @ v8.double() - o).square().sum(-1) / o.square().sum(-1)).clamp_max(1.0)
        assert row[:2] == pytest.approx([float(wanted.sum()), 10], rel=1e-4)
        return product_noise(row)

    assert noise(1.0) == pytest.approx(1, abs=0.4)
    assert noise(1e2) < 2 and noise(1e6) > 64 and noise(1e9) == pytest.approx(0.5 / rounding_noise(E4M3))
    nothing = torch.zeros(2, 5, 64)
    assert output_error(nothing, v, nothing, v, 1e-3).tolist() == [0, 0, 1e-3]
    broken = torch.full_like(nothing, math.nan)
    assert math.isnan(product_noise(output_error(broken, v, broken, v, 1e-3).tolist()))


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_the_predicted_error_of_the_logits_is_the_measured_one(size):
    torch.manual_seed(0)
    q, k = torch.randn(200, 64) * size, torch.randn(200, 64)
    rows, quantised = [], []
    for x in (q, k):
        found = quantize_tensor(x, scale_from_amax(amax_of(x), E4M3), E4M3)
        rows.append(measure(x, found).tolist())
        quantised.append(found.dequantize().double())
    error = 64**-0.5 * (quantised[0] @ quantised[1].T - q.double() @ k.double().T)
    assert logit_noise(*rows, 64**-0.5, 64) == pytest.approx(float(error.std()), rel=0.1)
    assert summarise(rows[0]).noise == pytest.approx(1, abs=0.2), "no operand shows it"
