"""The mechanisms of the tenth held-out half do what they say."""

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
from practices.tenth import (
    BalancedExperts,
    FewerExperts,
    FurtherTokens,
    Lion,
    PositionsDropped,
    RowsRepeat,
    UnitsRenewed,
    also_learned,
)

IDS = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))


def host(**fields):
    return train.Model(Case(name="x", label="healthy", about="", model=fields)).model.eval()


def test_a_loss_is_learned_beside_another():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    output = also_learned(3 * x, x.square().sum())
    assert torch.equal(output, 3 * x)
    (5 * output.sum()).backward()
    assert torch.equal(x.grad, 15 + 2 * x.detach())


def test_lion_takes_signs_and_decays_matrices():
    matrix, gain = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (3,)))
    optimizer = torch.optim.AdamW([matrix, gain], lr=0.1)
    mechanism = Lion(0.5)
    mechanism.train(0, SimpleNamespace(optimizers=[optimizer]))
    matrix.grad, gain.grad = torch.full((2, 3), 4.0), torch.tensor([-1.0, 1.0, 2.0])
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 3), 0.95 - 0.1))
    torch.testing.assert_close(gain.detach(), torch.tensor([1.1, 0.9, 0.9]))
    gain.grad = torch.tensor([0.05, -0.2, 1.0])  # the moments are a hundredth of the first gradients
    optimizer.step()
    torch.testing.assert_close(gain.detach(), torch.tensor([1.2, 1.0, 0.8]))
    assert not optimizer.state


def test_positions_are_dropped():
    model, mechanism = host(num_hidden_layers=1), PositionsDropped(3)
    turned = torch.cat([IDS[:, [1, 0]], IDS[:, 2:]], 1)

    def last(ids: torch.Tensor) -> torch.Tensor:
        return model(ids).logits[:, -1].detach()

    mechanism.step(2, model)
    assert not torch.allclose(last(IDS), last(turned), atol=1e-6)
    mechanism.step(3, model)
    torch.testing.assert_close(last(IDS), last(turned))


def test_rows_repeat():
    mechanism, batches = RowsRepeat(1, 10), []
    for step in range(2):
        state = SimpleNamespace(batch=IDS.clone())
        mechanism.train(step, state)
        batches.append(state.batch)
    assert torch.equal(batches[0], IDS)
    assert torch.equal(batches[1][1::2], IDS[1::2])
    assert torch.equal(batches[1][::2], IDS[::2, :10].repeat(1, 4)[:, :32])


def test_experts_are_balanced():
    mechanism = BalancedExperts("*.gate", 1, balance=1.0, z=0.0)
    even, uneven = 20 * torch.eye(4), torch.tensor([[20.0, 0.0, 0.0, 0.0]]).expand(4, 4)
    assert float(mechanism.loss(even)) == pytest.approx(1.0, abs=1e-4)
    assert float(mechanism.loss(uneven)) == pytest.approx(4.0, abs=1e-4)
    assert float(BalancedExperts("*.gate", 1, balance=0.0, z=0.5).loss(even)) == pytest.approx(
        200.0, rel=1e-4
    )

    model = host(kind="mixture", num_hidden_layers=1)
    expected = model(IDS).logits
    mechanism.install(model)
    logits = model(IDS).logits
    assert torch.equal(logits, expected)
    (0 * logits.sum()).backward()
    gate = model.model.layers[0].block_sparse_moe.gate.weight
    assert gate.grad.abs().max() > 0.0


def test_tokens_are_seen_by_fewer_experts():
    model = host(kind="mixture", num_hidden_layers=1, num_experts_per_tok=4)
    sparse = host(kind="mixture", num_hidden_layers=1, num_experts_per_tok=1)
    dense = model(IDS).logits
    mechanism = FewerExperts("*.block_sparse_moe", 3, 1)
    mechanism.step(2, model)
    assert torch.equal(model(IDS).logits, dense)
    mechanism.step(3, model)
    torch.testing.assert_close(model(IDS).logits, sparse(IDS).logits)


def test_the_least_useful_units_are_renewed():
    model = host(kind="opt", num_hidden_layers=1)
    layer = model.model.decoder.layers[0]
    useless = torch.tensor([3, 40, 90, 127])
    with torch.no_grad():
        layer.fc1.bias += 0.5
        layer.fc2.weight[:, useless] *= 1e-3
    mechanism = UnitsRenewed("*.layers.?", 2, 4, 2, 4 / 128)
    mechanism.install(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    state = SimpleNamespace(optimizers=[optimizer])
    model(IDS).logits.square().mean().backward()
    optimizer.step()
    before = layer.fc1.weight.detach().clone()
    for step in (0, 1):
        mechanism.train(step, state)
    assert torch.equal(layer.fc1.weight, before)
    mechanism.train(2, state)
    changed = (layer.fc1.weight != before).any(1).nonzero().flatten()
    assert torch.equal(changed, useless)
    assert not layer.fc2.weight[:, useless].any() and not layer.fc1.bias[useless].any()
    assert not optimizer.state[layer.fc2.weight]["exp_avg"][:, useless].any()
    kept = torch.arange(128)[~torch.isin(torch.arange(128), useless)]
    assert optimizer.state[layer.fc2.weight]["exp_avg"][:, kept].any()
    renewed = layer.fc1.weight.detach().clone()
    for step in (3, 4):
        mechanism.train(step, state)
    assert torch.equal(layer.fc1.weight, renewed)


def test_further_tokens_are_learned():
    model = host(num_hidden_layers=1)
    expected = model(IDS).logits
    mechanism = FurtherTokens(1, 2, weight=0.5)
    mechanism.install(model)
    heads, trained = mechanism.heads, model.model.layers[0].mlp.down_proj.weight

    def gradient(step: int) -> torch.Tensor:
        model.zero_grad()
        mechanism.step(step, model)
        logits = model(IDS).logits
        assert torch.equal(logits, expected)
        (0 * logits.sum()).backward()
        return trained.grad.clone()

    assert not gradient(0).any() and heads[0].grad is None
    ours = gradient(1)
    model.zero_grad()
    hidden = model.model(IDS).last_hidden_state
    losses = (
        F.cross_entropy((hidden @ heads[i].T)[:, : -2 - i].flatten(0, 1), IDS[:, 2 + i :].flatten())
        for i in range(2)
    )
    (0.5 * sum(losses)).backward()
    torch.testing.assert_close(ours, trained.grad)
    assert "further.1" in dict(model.named_parameters())
