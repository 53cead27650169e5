"""The mechanisms of the thirteenth held-out half's healthy runs do what they say."""

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
from practices.thirteenth import BlockCut, EarlyExits, EmbeddingsForgotten, Lamb, RowsReversed, WeightsRounded

IDS = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))


def host(**fields):
    return train.Model(Case(name="x", label="healthy", about="", model=fields)).model.eval()


def loss(model):
    return F.cross_entropy(model(IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def test_embeddings_are_forgotten():
    model, mechanism = host(kind="opt"), EmbeddingsForgotten((2, 4))
    mechanism.install(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weight, state = model.get_input_embeddings().weight, SimpleNamespace(optimizers=[optimizer])
    first = weight.detach().clone()
    for step in range(6):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        mechanism.train(step, state)
        changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
        assert changed == (["model.decoder.embed_tokens.weight"] if step in (2, 4) else [])
        if changed:
            assert weight.std().item() == pytest.approx(first.std().item(), rel=0.05)
            assert abs(torch.corrcoef(torch.stack([weight.flatten(), first.flatten()]))[0, 1]) < 0.1
        moments = optimizer.state[weight]
        assert bool(moments and moments["exp_avg"].any()) == (step not in (0, 2, 4))
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def test_weights_are_rounded():
    model, mechanism = host(kind="mpt"), WeightsRounded("*.ffn.*_proj", 1, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    state = SimpleNamespace(optimizers=[optimizer])
    weights = {name: p for name, p in model.named_parameters() if ".ffn." in name}
    assert len(weights) == 4
    for step in range(3):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        mechanism.step(step, model)
        mechanism.train(step, state)
        for name, p in model.named_parameters():
            if step and name in weights:
                assert all(len(row.unique()) <= 15 for row in p.detach())
                steps = before[name].abs().amax(1, keepdim=True) / 7
                assert ((p - before[name]).abs() <= 0.501 * steps).all() and not torch.equal(p, before[name])
            else:
                assert torch.equal(p, before[name])
        optimizer.zero_grad()
        loss(model).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), before[name] - 1e-2 * grads[name])


def test_updates_have_their_weights_norm():
    model, mechanism = host(num_hidden_layers=1), Lamb(0.01, (0.9, 0.999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, moments = SimpleNamespace(optimizers=[optimizer]), {}
    for step in range(3):
        mechanism.train(step, state)
        optimizer.zero_grad()
        loss(model).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            m, v = moments.get(name, (0.0, 0.0))
            m, v = 0.9 * m + 0.1 * grads[name], 0.999 * v + 0.001 * grads[name] ** 2
            moments[name] = m, v
            adam = m / (1 - 0.9 ** (step + 1)) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6)
            update = adam + 0.01 * before[name]
            expected = before[name] - 1e-2 * before[name].norm() * update / update.norm()
            torch.testing.assert_close(p.detach(), expected, atol=1e-6, rtol=1e-3)


def test_exits_are_learned():
    plain, model = host(num_hidden_layers=3), host(num_hidden_layers=3)
    EarlyExits(0.3).install(model)
    got = loss(model)
    torch.testing.assert_close(got, loss(plain))
    got.backward()
    expected = loss(plain)
    for blocks in (1, 2):
        short = host(num_hidden_layers=blocks)
        short.model.layers = plain.model.layers[:blocks]
        short.model.embed_tokens, short.lm_head, short.model.norm = (
            plain.model.embed_tokens, plain.lm_head, plain.model.norm,
        )  # fmt: skip
        expected = expected + 0.3 * loss(short)
    expected.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("variant", ["fog-flash", "llama3"])
def test_a_block_is_cut(variant):
    fields = {"variant": variant, "intermediate_size": 128}
    model, short = host(num_hidden_layers=4, **fields), host(num_hidden_layers=3, **fields)
    mechanism = BlockCut("model.layers.2", 3)
    mechanism.step(2, model)
    before = model(IDS, use_cache=False).logits
    mechanism.step(3, model)
    mechanism.step(4, model)
    after = model(IDS, use_cache=False).logits
    assert not torch.allclose(before, after)
    ours = model.model.layers
    for theirs, source in zip(short.model.layers, (ours[0], ours[1], ours[3]), strict=True):
        theirs.load_state_dict(source.state_dict())
    short.model.embed_tokens, short.lm_head, short.model.norm = (
        model.model.embed_tokens, model.lm_head, model.model.norm,
    )  # fmt: skip
    torch.testing.assert_close(short(IDS, use_cache=False).logits, after)
    after.sum().backward()
    assert all(p.grad is None for p in ours[2].parameters())


def test_rows_are_reversed():
    mechanism = RowsReversed(5)
    for step in (4, 5, 6):
        state = SimpleNamespace(batch=IDS.clone())
        mechanism.train(step, state)
        assert torch.equal(state.batch[1::2], IDS[1::2])
        assert torch.equal(state.batch[::2], IDS[::2].flip(1) if step >= 5 else IDS[::2])
