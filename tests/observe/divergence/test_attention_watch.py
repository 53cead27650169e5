"""Attention's operands: seen in FP8 and out of it, on every host, without changing a bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.observe.attention_error import Spots, logit_noise
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
            rung = "real" if running else "shadow"
            assert (
                looked.operands.keys()
                == looked.output.keys()
                == looked.logits.keys()
                == looked.costs.keys()
                == {rung}
            )
            assert looked.operands[rung].keys() == {"q", "k", "v", "do"}
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
    assert looked.operands["real"]["do"][0] == pytest.approx(1e6, rel=0.01)
    whole = summarise(measure(*shown["do"]).tolist())
    found = summarise(looked.operands["real"]["do"].tolist())
    assert found.flushed == pytest.approx(whole.flushed, abs=0.01) and found.flushed > 0.3
    attention.set_recipe(None)
    shadow = summarise(look(1e6)[0].operands["shadow"]["do"].tolist())
    assert shadow.flushed == pytest.approx(found.flushed, abs=0.05)
    assert summarise(look(0.0)[0].operands["shadow"]["do"].tolist()).flushed > 0.3 or recipe == "current"


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_what_it_costs_is_by_what_it_puts_out_and_what_comes_back(host, recipe):
    """The error is the one that the attention makes, and the gradient that of the same head and query, however hosts lay them out."""
    model, run = HOSTS[host]()
    apply_fp8(model, recipe={"name": recipe, "fp8_format": "e4m3"}, attention=True)
    attentions = {n: m for n, m in model.named_modules() if isinstance(m, FP8DotProductAttention)}
    configured = next(iter(attentions.values())).configured_recipe
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.set_recipe(None)
    wanted, costs = {}, {}
    for _ in range(3):  # delayed scaling knows the amaxes then
        watch, amax = AttentionWatch(lambda hook: hook), {}
        watch.attach({n: (m, None) for n, m in attentions.items()}, {})
        for name, module in attentions.items():

            def look(q, k, v, mask, scale, out, heads_dim, name=name, inner=module.look, amax=amax):
                inner(q, k, v, mask, scale, out, heads_dim)
                assert heads_dim == 1
                exact = nn.functional.scaled_dot_product_attention(
                    q.detach().double(), k.detach().double(), v.detach().double(), scale=scale,
                    attn_mask=mask.dense(q.shape[2], k.shape[2], q.device, torch.float64), enable_gqa=True,
                )  # fmt: skip
                spots = Spots.spread(q)
                error = spots.take(out - exact)

                def keep(do):
                    felt = (error * spots.take(do)).sum(-1).double().square().mean()
                    wanted[name] = 0.5 * q.shape[0] * q.shape[2] * spots.of * float(felt)

                out.register_hook(keep)
                amax.update({(name, o): float(x.abs().max()) for o, x in zip("qkv", (q, k, v), strict=True)})

            module.look = look
        run().square().mean().backward()
        costs["real"] = {name: looked.costs["real"].tolist() for name, looked in watch.collect().items()}
    for module in attentions.values():
        module.set_recipe(None)
    watch = AttentionWatch(lambda hook: hook)
    watch.attach({n: (m, configured) for n, m in attentions.items()}, amax)
    run().square().mean().backward()
    costs["shadow"] = {name: looked.costs["shadow"].tolist() for name, looked in watch.collect().items()}
    assert wanted.keys() == attentions.keys()
    for rung in costs:
        for name, (total, tokens) in costs[rung].items():
            assert tokens == 32
            # As a shadow the output of delayed scaling is rounded by its own amax, to other values as many.
            near = 3.0 if (rung, recipe) == ("shadow", "delayed") else 0.3 if rung == "shadow" else 0.1
            assert math.log(total * tokens / wanted[name]) == pytest.approx(0, abs=math.log1p(near)), rung
