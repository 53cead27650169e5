"""The mechanisms of the fourteenth held-out half's healthy runs do what they say."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import train
from case import Case
from practices.fourteenth import (
    BracketsFirst,
    ExpertsBiased,
    NormsRemoved,
    OuterMomentum,
    QueriesAndKeysClipped,
    TokensLeftOut,
)

IDS = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))


def host(**fields):
    return train.Model(Case(name="x", label="healthy", about="", model=fields)).model.eval()


def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def loss(model):
    return F.cross_entropy(logits(model)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def test_queries_and_keys_are_clipped():
    model, mechanism = host(kind="mpt", n_layers=2), QueriesAndKeysClipped("*.attn", 20.0)
    mechanism.install(model)
    first = model.transformer.blocks[0].attn
    with torch.no_grad():
        first.Wqkv.weight[:16] *= 100  # the queries of the first head of four
    logits(model)
    largest = mechanism.largest["transformer.blocks.0.attn"].clone()
    assert largest[0] > 20 and (largest[1:] < 20).all()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    mechanism.step(1, model)
    assert mechanism.clipped == 1
    for name, p in model.named_parameters():
        expected = before[name].clone()
        if name == "transformer.blocks.0.attn.Wqkv.weight":
            expected[[*range(16), *range(64, 80)]] *= (20 / largest[0]).sqrt()
        torch.testing.assert_close(p.detach(), expected)
    logits(model)
    after = mechanism.largest["transformer.blocks.0.attn"]
    assert after[0].item() == pytest.approx(20.0, rel=1e-4)
    torch.testing.assert_close(after[1:], largest[1:])


def test_largest_logits_are_attentions():
    model, mechanism = host(kind="mpt", n_layers=1), QueriesAndKeysClipped("*.attn", 1e9)
    mechanism.install(model)
    attention = model.transformer.blocks[0].attn
    seen = []
    attention.Wqkv.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    logits(model)
    q, k, v = (x.view(4, 32, 4, 16).transpose(1, 2) for x in seen[0].split(64, -1))
    theirs = torch.full((4,), -torch.inf)
    for row in range(4):
        for head in range(4):
            for t in range(32):
                theirs[head] = max(theirs[head], (k[row, head, : t + 1] @ q[row, head, t]).max() / 4)
    torch.testing.assert_close(mechanism.largest["transformer.blocks.0.attn"], theirs)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    got = []
    attention.out_proj.register_forward_pre_hook(lambda module, args: got.append(args[0].detach()))
    logits(model)
    torch.testing.assert_close(got[0], attended)  # heads lie in Wqkv as the mechanism takes them


def test_outer_momentum_is_nesterovs():
    model, mechanism = host(num_hidden_layers=1), OuterMomentum(3, 0.8, 0.6)
    weight = model.model.layers[0].mlp.down_proj.weight
    anchor = weight.detach().clone().requires_grad_()
    theirs = torch.optim.SGD([anchor], lr=0.8, momentum=0.6, nesterov=True)
    generator = torch.Generator().manual_seed(2)
    for step in range(10):
        before = weight.detach().clone()
        mechanism.step(step, model)
        if step and step % 3 == 0:
            anchor.grad = anchor.detach() - before
            theirs.step()
            torch.testing.assert_close(weight.detach(), anchor.detach())
        else:
            assert torch.equal(weight, before)
        with torch.no_grad():
            weight += 0.01 * torch.randn(weight.shape, generator=generator)


def test_tokens_are_left_out():
    model = host(kind="opt", num_hidden_layers=3)
    mechanism = TokensLeftOut("*.layers.1", lambda step: (8, 32)[step])
    whole = logits(model).detach()
    mechanism.install(model)
    block, inner = model.model.decoder.layers[1], []
    block.fc1.register_forward_hook(lambda module, args, output: inner.append(args[0]))
    outer = []
    model.model.decoder.layers[0].register_forward_hook(lambda module, args, output: outer.append(output[0]))
    model.model.decoder.layers[2].register_forward_pre_hook(lambda module, args: outer.append(args[0]))
    mechanism.step(0, model)
    torch.manual_seed(0)
    logits(model).sum().backward()
    assert inner[0].shape == (4 * 8, 64)
    same = (outer[0] == outer[1]).all(-1)
    assert (same.sum(1) == 24).all() and (same == same[0]).all()
    assert all(p.grad is not None for p in block.parameters())
    at = (~same[0]).nonzero().flatten()
    mask = torch.full((8, 8), -torch.inf).triu(1).expand(4, 1, 8, 8)
    alone = type(block).forward(block, outer[0][:, at], attention_mask=mask)[0]
    torch.testing.assert_close(outer[1][:, at], alone)
    mechanism.step(1, model)
    torch.testing.assert_close(logits(model), whole)


@pytest.mark.parametrize("fields", [{}, {"kind": "mpt"}])
def test_norms_are_removed(fields):
    model = host(**fields)
    names = ("*.layers.0.mlp_norm", "*.layers.0.input_norm")
    if fields:
        names = ("*.blocks.0.norm_2", "*.blocks.0.norm_1")
    modules = dict(model.named_modules())
    norms = [next(m for name, m in modules.items() if name.endswith(pattern[1:])) for pattern in names]
    mechanism = NormsRemoved(names, 2, 3)
    plain = logits(model).detach()
    mechanism.install(model)
    seen = {}
    for which, norm in enumerate(norms):
        norm.register_forward_hook(
            lambda m, args, output, which=which: seen.__setitem__(which, (args[0], output))
        )
    for step in range(7):
        mechanism.step(step, model)
        got = logits(model).detach()
        gone = 0 if step < 2 else 1 if step < 5 else 2
        if not gone:
            torch.testing.assert_close(got, plain)
        else:
            assert not torch.allclose(got, plain)
        for which, (x, output) in seen.items():
            x = x - x.mean(-1, keepdim=True) if fields else x
            sizes = (x.square().mean(-1, keepdim=True) + norms[which].eps).sqrt()
            divisor = mechanism.sizes[which] if which < gone else sizes
            torch.testing.assert_close(output, x / divisor * norms[which].weight, atol=1e-5, rtol=1e-4)
            if step == 1:  # the mean over tokens, which stays from step to step as the weights do
                assert mechanism.sizes[which].item() == pytest.approx(sizes.mean().item(), rel=1e-4)


def test_experts_are_chosen_with_biases():
    plain, model = host(kind="mixture"), host(kind="mixture")
    mechanism = ExpertsBiased("*.block_sparse_moe", 0.02)
    mechanism.install(model)
    torch.testing.assert_close(logits(model), logits(plain))  # biases are zero
    loss(model).backward()
    loss(plain).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4, msg=name)
    # In two passes, two experts a token.
    assert [int(seen.sum()) for seen in mechanism.seen] == [2 * 2 * 4 * 32] * 2
    counts = mechanism.seen[0].clone()
    mechanism.step(1, model)
    for bias, count in zip(mechanism.biases[0], counts, strict=True):
        assert bias.item() == pytest.approx(0.02 * (1 if count < 128 else -1 if count > 128 else 0))
    assert not mechanism.seen[0].any()
    mechanism.biases[0] = torch.tensor([0.0, 9.0, 0.0, 9.0])
    mixture = model.model.layers[0].block_sparse_moe
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))
    out, router = mixture(x)
    assert mechanism.seen[0].tolist() == [0.0, 10.0, 0.0, 10.0]
    given = router[:, [1, 3]].softmax(-1)  # what they weigh is without biases
    flat = x.flatten(0, 1)
    expected = given[:, :1] * mixture.experts[1](flat) + given[:, 1:] * mixture.experts[3](flat)
    torch.testing.assert_close(out.flatten(0, 1), expected)


def test_uneven_experts_become_even():
    model, mechanism = host(kind="mixture"), ExpertsBiased("*.block_sparse_moe", 0.02)
    mechanism.install(model)
    with torch.no_grad():
        model.model.layers[0].block_sparse_moe.gate.weight *= 10
    worst = []
    for step in range(60):
        mechanism.step(step, model)
        logits(model)
        worst.append(float(mechanism.seen[0].max() / mechanism.seen[0].mean()))
    assert sum(worst[-10:]) / 10 - 1 < 0.5 * (worst[0] - 1)


def test_brackets_come_first():
    mechanism = BracketsFirst(3, 16)
    kinds = set()
    for step in range(5):
        state = SimpleNamespace(batch=IDS.clone())
        mechanism.train(step, state)
        if step >= 3:
            assert torch.equal(state.batch, IDS)
            continue
        assert state.batch.shape == IDS.shape and state.batch.dtype == IDS.dtype
        for row in state.batch.tolist():
            open_ = [0] * 16
            for token in row:
                kind, closes = divmod(token, 2)
                open_[kind] += -1 if closes else 1
                kinds.add(kind)
                assert min(open_) >= 0
            closed = sum(token % 2 for token in row)
            assert 0 < closed <= 16
    assert kinds == set(range(16))
