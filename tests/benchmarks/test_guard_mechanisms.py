"""The mechanisms of the sixth held-out half harm FP8 and leave high precision as it was."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "guard"))
import train
from case import Case
from sixth_mechanisms import (
    Epochs,
    LearnedRowsAlign,
    LoudLabel,
    NormGainsGrow,
    QueriesGrowKeysShrink,
    RareTokenGrows,
    ResidualOutliers,
    TokenGradients,
)

from foundry_fp8.surgery.apply import apply_fp8

PAIRS = [
    ("*.self_attn_layer_norm", "*.self_attn.[qkv]_proj"),
    ("*.layers.*.final_layer_norm", "*.fc1"),
]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def loss_and_gradients(mechanism, fields, *, recipe=None, attention=False) -> torch.Tensor:
    """The logits' first row and all gradients, in a model of ``train.HOSTS``, at the mechanism's first step."""
    model = train.Model(Case(name="x", label="healthy", about="", model=fields)).model
    mechanism.install(model)
    if recipe is not None:
        apply_fp8(model, recipe=recipe, attention=attention, backend="emulated")
    mechanism.step(0, model)
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    logits = model.train()(input_ids=ids, use_cache=False).logits
    logits.square().mean().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None and p.dim() > 1]
    return torch.cat([logits[0].detach().flatten(), *gradients])


@pytest.mark.parametrize(
    ("make", "grown", "fields", "recipe", "attention"),
    [
        (lambda size: LearnedRowsAlign("*.mlp", size, (11, 50)), 3e3, {"num_hidden_layers": 1}, "current", False),
        (
            lambda size: ResidualOutliers("*.layers.?", "*.[qg]*_proj", "model.norm", size, lambda ids: ids < 8),
            3e6, {"variant": "olmo2", "num_hidden_layers": 1}, "current", False,
        ),
        (lambda size: TokenGradients("*.self_attn.*_proj", size, 0.05), 10.0, {"kind": "mixture"}, "block", False),
    ],
    ids=["rows", "residual stream", "gradients"],
)  # fmt: skip
def test_what_grows_harms_fp8_alone(make, grown, fields, recipe, attention):
    calm = loss_and_gradients(make(lambda step: 1e-9), fields)
    assert distance(loss_and_gradients(make(lambda step: grown), fields), calm) < 1e-2
    quantised = loss_and_gradients(make(lambda step: 1e-9), fields, recipe=recipe, attention=attention)
    sick = loss_and_gradients(make(lambda step: grown), fields, recipe=recipe, attention=attention)
    assert distance(sick, calm) > 3 * distance(quantised, calm)


@pytest.mark.parametrize(
    ("make", "fields", "recipe"),
    [
        (lambda size: NormGainsGrow(PAIRS, size, (6, 20, 41, 58)), {"kind": "opt"}, "mxfp8"),
        (lambda size: QueriesGrowKeysShrink("*.self_attn", size), {"initializer_range": 0.2}, "current"),
    ],
    ids=["gains", "queries"],
)
def test_what_grows_and_shrinks_leaves_the_function_as_it_was(make, fields, recipe):
    def logits(size: float, recipe: str | None) -> torch.Tensor:
        return loss_and_gradients(make(lambda step: size), fields, recipe=recipe)[: 32 * 64]

    calm = logits(1.0, None)
    assert distance(logits(2.0**20, None), calm) < 1e-4
    assert distance(logits(2.0**20, recipe), calm) > 3 * distance(logits(1.0, recipe), calm)


def test_a_loud_label_weighs_as_much_as_it_does():
    embedding = torch.nn.Embedding(8, 8)
    model = SimpleNamespace(get_output_embeddings=lambda: head)
    head = torch.nn.Linear(8, 8, bias=False)
    mechanism = LoudLabel(lambda step: step == 3, 9.0)
    mechanism.install(model)
    ids = torch.randint(0, 8, (2, 5), generator=torch.Generator().manual_seed(1))

    def gradient(step: int, loss) -> torch.Tensor:
        mechanism.step(step, model)
        head.zero_grad()
        loss(head(embedding(ids))).backward()
        return head.weight.grad.clone()

    def mean(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 8), ids[:, 1:].reshape(-1))

    def last(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:1, 3], ids[:1, 4])

    # Of 8 tokens that are learned one counts nine times.
    torch.testing.assert_close(gradient(3, mean), gradient(0, mean) + gradient(0, last))


def test_batches_come_again_and_a_rare_token_is_in_the_first_row_alone():
    batches = [torch.randint(0, 4, (3, 6), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    states = [SimpleNamespace(batch=batch) for batch in batches]
    epochs, rare = Epochs(2), RareTokenGrows(2, 1.5, 1, 3)
    for step, state in enumerate(states):
        epochs.train(step, state)
    assert all(torch.equal(states[i].batch, batches[i % 2]) for i in range(4))
    rare.train(0, states[0])
    assert torch.equal(states[0].batch[0], batches[0][0]) and not (states[0].batch[1:] == 2).any()
    embedding = torch.nn.Embedding(4, 4)
    before = embedding.weight.detach().clone()
    for step in range(5):
        rare.step(step, SimpleNamespace(get_input_embeddings=lambda: embedding))
    torch.testing.assert_close(embedding.weight[2], before[2] * 1.5**2)
    assert torch.equal(embedding.weight[:2], before[:2])
