"""The mechanisms of the ninth held-out half do what they say."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import train
from case import Case
from practices.ninth import (
    ContextExtended,
    Muon,
    Pruned,
    RowsRewarded,
    ShrunkAndPerturbed,
    Stacked,
    orthogonalised,
)

IDS = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))


def host(**fields):
    return train.Model(Case(name="x", label="healthy", about="", model=fields)).model.eval()


def linear(rows: int, columns: int) -> torch.nn.ModuleDict:
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(columns, rows, bias=False)})
    torch.nn.init.normal_(model["one"].weight, generator=torch.Generator().manual_seed(2))
    return model


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_muon_takes_orthogonal_steps_and_leaves_the_rest_to_adam(shape):
    update = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonalised(update))
    assert values.min() > 0.5 and values.max() < 1.5

    model = linear(*shape)
    model["other"] = torch.nn.Linear(3, 3, bias=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    mechanism = Muon("one", decay=0.0)
    mechanism.step(0, model)
    mechanism.train(0, SimpleNamespace(optimizers=[optimizer]))
    model["one"].weight.grad, model["other"].weight.grad = update.clone(), torch.ones(3, 3)
    optimizer.step()
    went = before["one.weight"] - model["one"].weight.detach()
    torch.testing.assert_close(went, 0.02 * 24**0.5 * orthogonalised(update))
    torch.testing.assert_close(
        before["other.weight"] - model["other"].weight.detach(), torch.full((3, 3), 0.1)
    )
    assert list(optimizer.state) == [model["other"].weight]


def test_blocks_are_stacked():
    model = host(kind="opt", num_hidden_layers=4)
    two = host(kind="opt", num_hidden_layers=4)
    del two.model.decoder.layers[2:]
    two.load_state_dict(model.state_dict(), strict=False)
    mechanism = Stacked("*.layers.?", 2)
    mechanism.install(model)
    mechanism.step(1, model)
    torch.testing.assert_close(model(IDS, use_cache=False).logits, two(IDS, use_cache=False).logits)
    mechanism.step(2, model)
    layers = model.model.decoder.layers
    for ours, theirs in ((2, 0), (3, 1)):
        assert torch.equal(layers[ours].fc1.weight, layers[theirs].fc1.weight)
    assert not torch.equal(layers[2].fc1.weight, layers[3].fc1.weight)
    two.model.decoder.layers.extend(two.model.decoder.layers[:2])  # runs twice what it has
    torch.testing.assert_close(model(IDS, use_cache=False).logits, two(IDS, use_cache=False).logits)


def test_weights_are_pruned_and_stay_so():
    model, shares = linear(40, 50), []
    weight = model["one"].weight
    large = weight.detach().abs().flatten().topk(600).indices
    mechanism = Pruned("one", 10, 30, 10, 0.6)
    for step in range(40):
        mechanism.step(step, model)
        shares.append(float((weight == 0).float().mean()))
        if step == 35:
            with torch.no_grad():
                weight += 0.01  # as an optimizer might
    assert shares[9] == 0.0 and shares[20] == shares[29] == pytest.approx(0.6 * (1 - 0.5**3), abs=1e-3)
    assert shares[30] == shares[39] == pytest.approx(0.6, abs=1e-3)
    assert weight.detach().flatten()[large].all()


def test_matrices_shrink_and_are_perturbed():
    model = linear(100, 100)
    mechanism = ShrunkAndPerturbed((3,), 0.5, 0.3)
    mechanism.install(model)
    before = model["one"].weight.detach().clone()
    mechanism.step(2, model)
    assert torch.equal(model["one"].weight, before)
    mechanism.step(3, model)
    noise = model["one"].weight.detach() - 0.5 * before
    assert float(noise.std()) == pytest.approx(0.3 * float(before.std()), rel=0.05)


def test_the_context_is_extended():
    model = host(rope_theta=50.0, rope_scaling=False)
    other = host(rope_theta=5000.0, rope_scaling=False)
    assert not torch.allclose(model(IDS).logits, other(IDS).logits, atol=1e-6)
    mechanism, lengths = ContextExtended(1, 12, 5000.0), []
    for step in range(2):
        state = SimpleNamespace(batch=IDS)
        mechanism.step(step, model)
        mechanism.train(step, state)
        lengths.append(state.batch.shape[1])
    assert lengths == [12, 32]
    torch.testing.assert_close(model(IDS).logits, other(IDS).logits)


def test_rows_weigh_by_their_advantage():
    model = host(num_hidden_layers=1)
    mechanism = RowsRewarded(1, 0.1, most=20.0)
    mechanism.install(model)

    def rows(step: int) -> torch.Tensor:
        """The gradient of each row's embeddings; norms and attention keep rows apart."""
        mechanism.step(step, model)
        embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
        model(inputs_embeds=embedded, use_cache=False).logits.square().mean().backward()
        return embedded.grad

    calm, weighed = rows(0), rows(1)
    factor = (weighed / calm).flatten(1).median(1).values
    torch.testing.assert_close(weighed, calm * factor[:, None, None])
    advantage = torch.randn(4, generator=torch.Generator().manual_seed(103))
    torch.testing.assert_close(factor, (advantage / 0.1).exp().clamp(max=20.0))
