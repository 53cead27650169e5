"""Attention's operands: seen in FP8 and out of it, on every host, without changing a bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.observe.attention_error import logit_noise
from foundry_fp8.observe.divergence.attention_watch import AttentionWatch
from foundry_fp8.observe.operand_health import measure, summarise
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
            rung = "real" if running else "shadow"
            assert looked.output.keys() == looked.logits.keys() == {rung}
            assert 0.1 < product_noise(looked.output[rung].tolist()) < 10
            assert 1e-4 < logit_noise(looked.logits[rung].tolist()) < 0.1
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
