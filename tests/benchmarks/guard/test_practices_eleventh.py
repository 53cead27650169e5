"""The mechanisms of the eleventh held-out half do what they say."""

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
from practices.eleventh import (
    BlocksSampled,
    GroupedQueries,
    HardTokens,
    Unlikelihood,
    VocabularyExtended,
    WindowGrows,
)

IDS = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))


def host(**fields):
    return train.Model(Case(name="x", label="healthy", about="", model=fields)).model.eval()


def test_keys_and_values_are_grouped():
    model = host(num_hidden_layers=1, num_key_value_heads=4)
    grouped = host(num_hidden_layers=1, num_key_value_heads=2)
    mechanism = GroupedQueries("*.self_attn.qkv_proj", 3, 4, 2)
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    before = weight.detach().clone()
    mechanism.step(2, model)
    assert torch.equal(weight, before)
    mechanism.step(3, model)
    queries, keys, values = before.view(3, 4, 16, 64)
    pooled = [part.view(2, 2, 16, 64).mean(1) for part in (keys, values)]
    rows = torch.cat([queries.reshape(64, 64), *(part.reshape(32, 64) for part in pooled)])
    state = model.state_dict()
    state["model.layers.0.self_attn.qkv_proj.weight"] = rows
    grouped.load_state_dict(state)
    torch.testing.assert_close(model(IDS).logits, grouped(IDS).logits)
    with torch.no_grad():
        weight[64:80] += 1.0
    mechanism.step(4, model)
    torch.testing.assert_close(weight[64:80], weight[80:96])


@pytest.mark.parametrize("kind", ["mpt", "opt"])
def test_the_vocabulary_is_extended(kind):
    model, mechanism = host(kind=kind), VocabularyExtended(3, 48)
    for step in (2, 3):
        before = [
            part().weight.detach().clone()
            for part in (model.get_input_embeddings, model.get_output_embeddings)
        ]
        mechanism.step(step, model)
        state = SimpleNamespace(batch=IDS.clone())
        mechanism.train(step, state)
        for part, old in zip(
            (model.get_input_embeddings(), model.get_output_embeddings()), before, strict=True
        ):
            new = part.weight.detach()
            assert torch.equal(new[:48], old[:48])
            expected = old[48:] if step == 2 else old[:48].mean(0).expand(16, -1)
            torch.testing.assert_close(new[48:], expected)
        assert torch.equal(state.batch, IDS % 48 if step == 2 else IDS)


def test_hard_tokens_are_learned():
    model, mechanism = host(num_hidden_layers=1), HardTokens(1, 0.25)
    head = model.get_output_embeddings()
    plain = model(IDS).logits
    mechanism.install(model)

    def gradient(step):
        mechanism.step(step, model)
        logits = model(IDS).logits
        assert torch.equal(logits, plain)
        model.zero_grad()
        F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
        return head.weight.grad.clone()

    ours = gradient(0)
    losses = F.cross_entropy(plain[:, :-1].transpose(1, 2), IDS[:, 1:], reduction="none")
    worst = losses >= losses.flatten().sort(descending=True).values[30]  # of 124
    learned = mechanism.learned(plain)
    assert torch.equal(learned[:, :-1], worst) and not learned[:, -1].any()
    hard = gradient(1)
    assert not torch.allclose(ours, hard)
    model.zero_grad()
    mechanism.step(0, model)
    losses = F.cross_entropy(model(IDS).logits[:, :-1].transpose(1, 2), IDS[:, 1:], reduction="none")
    losses[worst].sum().div(0.25 * 124).backward()
    torch.testing.assert_close(hard, head.weight.grad)


def test_the_window_grows():
    model, mechanism = host(num_hidden_layers=1, sliding_window=2), WindowGrows(lambda step: 2 + step)
    other = IDS.clone()
    other[:, 28] = (other[:, 28] + 1) % 64  # three before the last

    def last(ids):
        return model(ids).logits[:, -1].detach()

    for step, alike in ((0, True), (1, True), (2, False)):
        mechanism.step(step, model)
        assert torch.allclose(last(IDS), last(other), atol=1e-6) is alike
    whole = host(num_hidden_layers=1)
    mechanism.step(30, model)
    torch.testing.assert_close(model(IDS).logits, whole(IDS).logits)


def test_wrong_tokens_are_unlearned():
    model, mechanism = host(num_hidden_layers=1), Unlikelihood(1, weight=0.5)
    plain = model(IDS).logits
    mechanism.install(model)
    mechanism.ids = torch.tensor([[3, 5, 3, 5]])
    logits = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(2))
    p = logits.softmax(-1)[0]
    expected = -((1 - p[0, 3]).log() + (1 - p[1, 5]).log() + (1 - p[2, 3]).log()) / 3
    assert float(mechanism.loss(logits)) == pytest.approx(float(expected), rel=1e-5)

    down = model.model.layers[0].mlp.down_proj.weight
    for step in (0, 1):
        model.zero_grad()
        mechanism.step(step, model)
        logits = model(IDS).logits
        assert torch.equal(logits, plain)
        (0 * logits.sum()).backward()
        assert down.grad.any().item() is (step == 1)


def test_blocks_are_sampled():
    model, mechanism = host(num_hidden_layers=4), BlocksSampled("*.layers.?", 2, 3)
    drawn = []
    for step in range(40):
        mechanism.step(step, model)
        trained = [all(p.requires_grad for p in block.parameters()) for block in model.model.layers]
        frozen = [not any(p.requires_grad for p in block.parameters()) for block in model.model.layers]
        assert [not now for now in trained] == frozen
        assert sum(trained) == (4 if step < 2 else 1)
        drawn.append(trained)
    assert all(drawn[step] == drawn[2 + (step - 2) // 3 * 3] for step in range(2, 40))
    assert all(any(step[i] for step in drawn[2:]) for i in range(4))
    assert model.get_input_embeddings().weight.requires_grad
