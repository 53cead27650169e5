"""The mechanisms of the fourteenth half harm FP8 and leave high precision as it was."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import train
from case import Case
from mechanisms.fourteenth import GradientsOfLater, HeadsAlike, InitialWeightsGrow, KeysUnread

from tests.benchmarks.guard.test_mechanisms_later import assert_harms_fp8_alone

LLAMA = {"num_hidden_layers": 1}
OPT = {"kind": "opt", "num_hidden_layers": 1}
MIXTURE = {"kind": "mixture", "num_hidden_layers": 1}
MPT = {"kind": "mpt", "n_layers": 1}


@pytest.mark.parametrize(
    ("make", "grown", "fields", "recipe", "attention"),
    [
        (lambda size: HeadsAlike("*.o_proj", size, 4), 1e3, MIXTURE, "block", False),
        (lambda size: InitialWeightsGrow("*.layers.*_proj", size), 3.0, LLAMA, "current", False),
        (lambda size: KeysUnread("*.self_attn", size, 8), 300.0, OPT, "current", True),
        (lambda size: GradientsOfLater("*.blocks.*_proj", size), 300.0, MPT, "current", False),
    ],
    ids=["heads", "weights", "keys", "gradients"],
)
def test_what_grows_harms_fp8_alone(make, grown, fields, recipe, attention):
    assert_harms_fp8_alone(make, grown, fields, recipe, attention, felt=1e-2)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda size: HeadsAlike("*.o_proj", size, 4), MIXTURE),
        (lambda size: InitialWeightsGrow("*.layers.*_proj", size), LLAMA),
        (lambda size: KeysUnread("*.self_attn", size, 8), OPT),
        (lambda size: GradientsOfLater("*.blocks.*_proj", size), MPT),
    ],
    ids=["heads", "weights", "keys", "gradients"],
)
def test_weights_are_trained_as_if_nothing_had_happened(make, fields):
    def losses(rate: float) -> torch.Tensor:
        case = Case(
            name="x", label="healthy", about="", model=fields, steps=6,
            mechanism=lambda: make(lambda step: rate * step),
        )  # fmt: skip
        return torch.tensor(train.train(case, "high").losses)

    torch.testing.assert_close(losses(0.5), losses(0.0), rtol=1e-3, atol=1e-3)


def _called(model, name: str, of) -> torch.Tensor:
    """What ``of(inputs, outputs)`` is of the module ``name`` when ``model`` reads 4 rows; hooks of before are seen."""
    seen = []
    module = dict(model.named_modules())[name]
    module.register_forward_hook(lambda module, args, output: seen.append(of(args, output).detach()) and None)
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    model.train()(input_ids=ids, use_cache=False)
    return seen[0]


def test_heads_differ_as_before_and_are_alike():
    model = train.Model(Case(name="x", label="healthy", about="", model=MIXTURE)).model
    name = "model.layers.0.self_attn.o_proj"
    calm = _called(model, name, lambda args, output: args[0]).unflatten(-1, (4, -1))
    mechanism = HeadsAlike("*.o_proj", lambda step: 100.0, 4)
    mechanism.install(model)
    mechanism.step(0, model)
    heads = _called(model, name, lambda args, output: args[0]).unflatten(-1, (4, -1))
    torch.testing.assert_close(
        heads - heads.mean(-2, keepdim=True), calm - calm.mean(-2, keepdim=True), rtol=1e-2, atol=1e-4
    )
    # No head, channel or token has what the others have not: heads are alike.
    assert float(torch.cosine_similarity(heads[..., 0, :], heads[..., 3, :], -1).mean()) > 0.99


def test_initial_weights_are_of_full_rank_and_no_element_sticks_out():
    model = train.Model(Case(name="x", label="healthy", about="", model=LLAMA)).model
    weight = model.model.layers[0].mlp.down_proj.weight
    before = weight.detach().clone()
    mechanism = InitialWeightsGrow("*.down_proj", lambda step: 2.0)
    mechanism.install(model)
    mechanism.step(0, model)
    added = (weight - before).detach()
    assert int(torch.linalg.matrix_rank(added, rtol=1e-3)) == min(weight.shape)
    assert 1.9 < float(added.std()) < 2.1
    assert float(added.abs().max()) < 10.0


def test_keys_grow_where_queries_are_zero():
    model = train.Model(Case(name="x", label="healthy", about="", model=OPT)).model
    name = "model.decoder.layers.0.self_attn."
    mechanism = KeysUnread("*.self_attn", lambda step: 100.0, 8)
    calm = _called(model, f"{name}k_proj", lambda args, output: output)
    mechanism.install(model)
    mechanism.step(0, model)
    added = _called(model, f"{name}k_proj", lambda args, output: output) - calm
    queries = _called(model, f"{name}q_proj", lambda args, output: output)
    added, queries = (x.unflatten(-1, (4, 16)).transpose(1, 2) for x in (added, queries))
    assert float((queries @ added.mT).abs().max()) < 1e-3 * float(queries.norm(dim=-1).max()) * 100.0
    assert 90.0 < float(added.std()) < 110.0
    # Neither a channel nor the mean of all tokens sticks out.
    rows = added.square().mean((0, 2)).sqrt()
    assert float(rows.max() / rows.median()) < 4.0
    assert float(added.mean((0, 2)).norm() / added.norm(dim=-1).mean()) < 0.5


def test_a_tokens_gradient_gains_the_mean_of_those_behind_it():
    mechanism = GradientsOfLater("*", lambda step: 2.0)
    mechanism.step(0, torch.nn.Identity())
    gradient = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    gained = mechanism._later(gradient)
    for t in range(4):
        torch.testing.assert_close(gained[:, t], 2.0 * gradient[:, t + 1 :].mean(1))
    torch.testing.assert_close(gained[:, 4], torch.zeros(3, 4), rtol=0, atol=1e-6)
