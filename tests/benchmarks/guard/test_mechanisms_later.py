"""The mechanisms of the sixth held-out half and those after it harm FP8 and leave high precision as it was."""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import train
from case import Case
from mechanisms.seventh import (
    AmaxKept,
    AmaxOfAnother,
    ChannelsExchange,
    GradientChannels,
    LanguageMeans,
    Lookahead,
    PerRowChange,
    Silent,
    Upcycled,
)
from mechanisms.sixth import (
    Epochs,
    LearnedRowsAlign,
    LoudLabel,
    NormGainsGrow,
    QueriesGrowKeysShrink,
    RareTokenGrows,
    ResidualOutliers,
    TokenGradients,
)
from practices.eighth import Boilerplate, ShortDocuments, SwitchEma

from foundry_fp8.surgery.apply import apply_fp8
from tests.benchmarks.guard.test_mechanisms import distance

PAIRS = [
    ("*.self_attn_layer_norm", "*.self_attn.[qkv]_proj"),
    ("*.layers.*.final_layer_norm", "*.fc1"),
]


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


def assert_harms_fp8_alone(make, grown, fields, recipe, attention, *, felt):
    """``make(size)`` of size ``grown`` takes FP8 three times as far from high precision as FP8 is without it, which feels ``felt`` at most."""
    calm = loss_and_gradients(make(lambda step: 1e-9), fields)
    assert distance(loss_and_gradients(make(lambda step: grown), fields), calm) < felt
    quantised = loss_and_gradients(make(lambda step: 1e-9), fields, recipe=recipe, attention=attention)
    sick = loss_and_gradients(make(lambda step: grown), fields, recipe=recipe, attention=attention)
    assert distance(sick, calm) > 3 * distance(quantised, calm)


def trained(mechanism, recipe: str | None) -> torch.Tensor:
    """The logits of a Llama after three steps, in each of which ``mechanism`` has a factor of its own."""
    model = train.Model(Case(name="x", label="healthy", about="", model={"num_hidden_layers": 1})).model
    mechanism.install(model)
    if recipe is not None:
        apply_fp8(model, recipe=recipe, backend="emulated")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    for step in range(3):
        mechanism.step(step, model)
        optimizer.zero_grad()
        logits = model.train()(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        optimizer.step()
    return logits.detach()


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
    assert_harms_fp8_alone(make, grown, fields, recipe, attention, felt=1e-2)


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


def test_what_languages_add_harms_fp8_alone():
    fields = {"variant": "fog-opt", "num_hidden_layers": 1}
    test_what_grows_harms_fp8_alone(
        lambda size: LanguageMeans("*.[qu]*_proj", size), 300.0, fields, "current", False
    )


def test_channels_of_gradients_take_those_of_the_block_below_in_fp8_alone():
    def first_block(size: float, recipe: str | None) -> torch.Tensor:
        model = train.Model(Case(name="x", label="healthy", about="", model={"num_hidden_layers": 2})).model
        mechanism = GradientChannels("*.layers.*_proj", lambda step: size)
        mechanism.install(model)
        if recipe is not None:
            apply_fp8(model, recipe=recipe, backend="emulated")
        mechanism.step(0, model)
        ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
        model.train()(input_ids=ids, use_cache=False).logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.model.layers[0].parameters() if p.dim() > 1])

    calm = first_block(0.0, None)
    torch.testing.assert_close(first_block(1e3, None), calm)
    assert distance(first_block(1e3, "mxfp8"), calm) > 3 * distance(first_block(0.0, "mxfp8"), calm)


@pytest.mark.parametrize("even", [False, True], ids=["apart", "even"])
def test_channels_that_exchange_a_factor_train_as_they_did(even):
    def exchange(size) -> ChannelsExchange:
        return ChannelsExchange("*.layers.*_proj", size, even=even)

    calm = trained(exchange(lambda step: 1.0), None)
    assert distance(trained(exchange(lambda step: 1e3**step), None), calm) < 1e-3
    quantised = distance(trained(exchange(lambda step: 1.0), "current"), calm)
    sick = distance(trained(exchange(lambda step: 1e6**step), "current"), calm)
    assert sick < 2 * quantised if even else sick > 3 * quantised  # one factor is a scale's to take


def test_an_amax_of_another_rank_and_one_that_is_kept_set_the_scale():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    apply_fp8(model, recipe={"name": "delayed", "amax_history_len": 4}, backend="emulated")
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) / 10

    def scaled(mechanism, step: int, factor: float) -> float:
        """The amax of which the scale is that a forward runs with, after ``mechanism`` acted."""
        mechanism.step(step, model)
        model(factor * x).sum().backward()
        return 448.0 / float(model[0].slots["x"].scale)

    amax = float(x.abs().max())
    another, kept = AmaxOfAnother("0", lambda step: 50.0 * step), AmaxKept("0", 6)
    assert scaled(another, 0, 1.0) == 448.0 and scaled(another, 0, 1.0) == pytest.approx(amax)
    assert scaled(another, 1, 1.0) == pytest.approx(50.0)
    for _ in range(4):
        scaled(another, 0, 1.0)
    assert scaled(another, 0, 1.0) == pytest.approx(amax)  # the history forgot it
    assert scaled(kept, 5, 4.0) == pytest.approx(amax) and scaled(kept, 6, 4.0) == pytest.approx(4 * amax)
    assert scaled(kept, 7, 100.0) == pytest.approx(4 * amax) and scaled(kept, 8, 100.0) == pytest.approx(
        4 * amax
    )
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))  # in high precision there is no history
    another.step(3, plain)
    kept.step(9, plain)


def test_practice_does_what_it_says():
    experts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
    model = torch.nn.ModuleDict({"experts": experts})
    block = torch.nn.ModuleDict({"block": model})
    Upcycled().install(block)
    assert all(torch.equal(expert.weight, experts[0].weight) for expert in experts)
    Silent("block.experts.1").install(block)
    assert not experts[1].weight.any() and experts[0].weight.any()

    lookahead, start = Lookahead(2), experts[0].weight.detach().clone()
    for step in range(3):
        lookahead.step(step, block)
        if step < 2:
            with torch.no_grad():
                experts[0].weight += 1.0
    torch.testing.assert_close(experts[0].weight.detach(), start + 1.0)  # half of two steps

    states = [SimpleNamespace(batch=torch.arange(8).reshape(4, 2)) for _ in range(2)]
    for step, state in enumerate(states):
        PerRowChange(1, 2, lambda ids: 63 - ids).train(step, state)
    assert torch.equal(states[0].batch, torch.arange(8).reshape(4, 2))
    assert states[1].batch.tolist() == [[63, 62], [2, 3], [59, 58], [6, 7]]


def test_an_average_is_switched_to():
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    mechanism = SwitchEma(2, 0.75)
    for step in range(3):
        mechanism.step(step, model)
        if step < 2:
            with torch.no_grad():
                model.weight += 1.0
    # Zero, a quarter of the way to 1, and a quarter of the way from there to 2.
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 2), 0.25 + 0.25 * 1.75))


def test_documents_come_again_and_are_short():
    boilerplate = Boilerplate(1)
    states = [SimpleNamespace(batch=torch.arange(8).reshape(4, 2) + 10 * step) for step in range(2)]
    for step, state in enumerate(states):
        boilerplate.train(step, state)
    assert states[0].batch.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert states[1].batch.tolist() == [[10, 11], [12, 13], [14, 15], [6, 7]]

    given = torch.ones(6, 32, dtype=torch.long)
    state = SimpleNamespace(batch=given)
    ShortDocuments((3, 12)).train(0, state)
    assert given.all()  # the data are left as they are
    for row in state.batch:
        ends = [-1, *row.logical_not().nonzero().flatten().tolist(), 32]
        lengths = [b - a - 1 for a, b in itertools.pairwise(ends)]
        assert all(3 <= length <= 12 for length in lengths[:-1]) and lengths[-1] <= 12
    assert len({tuple(row.tolist()) for row in state.batch}) > 1
