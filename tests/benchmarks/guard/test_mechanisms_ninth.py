"""The mechanisms of the ninth half harm FP8 and leave high precision as it was."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import train
from case import Case
from mechanisms.ninth import (
    AttentionSink,
    DarkSignals,
    DeadUnitsGrow,
    PaddingGrows,
    QueryKeyGainsExchange,
    RowsExchange,
    ValuesExchange,
)

from tests.benchmarks.guard.test_mechanisms_later import (
    assert_harms_fp8_alone,
    distance,
    loss_and_gradients,
    trained,
)

QK_NORM = {"variant": "custom", "qk_norm": "rms", "qk_gain": "trainable", "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("make", "grown", "fields", "recipe", "attention"),
    [
        (lambda size: PaddingGrows("*.[gq]*_proj", size), 1e5, {"num_hidden_layers": 1}, "current", False),
        (lambda size: PaddingGrows("*.[gq]*_proj", size), 1e5, {"num_hidden_layers": 1}, "current", True),
        (lambda size: AttentionSink("*.attn", size), 1e9, {"kind": "mpt", "n_layers": 1}, "current", True),
        (lambda size: DarkSignals("*.ffn.*_proj", size), 30.0, {"kind": "mpt", "n_layers": 1}, "mxfp8", False),
        (lambda size: DeadUnitsGrow("*.fc1", size, (3, 47)), 1e6, {"kind": "opt", "num_hidden_layers": 1}, "block", False),
    ],
    ids=["padding", "padding in attention", "sink", "dark signals", "dead units"],
)  # fmt: skip
def test_what_grows_harms_fp8_alone(make, grown, fields, recipe, attention):
    assert_harms_fp8_alone(make, grown, fields, recipe, attention, felt=1e-3)


def test_what_grows_at_padding_is_not_seen_before_it():
    """With the padding and without it the text has the same logits; padding costs nothing."""

    def logits(mechanism) -> torch.Tensor:
        fields = {"num_hidden_layers": 1, "max_position_embeddings": 40}
        model = train.Model(Case(name="x", label="healthy", about="", model=fields))
        state = SimpleNamespace(
            batch=torch.randint(1, 64, (4, 32), generator=torch.Generator().manual_seed(1))
        )
        if mechanism is not None:
            mechanism.install(model.model)
            mechanism.step(0, model.model)
            mechanism.train(0, state)
            assert state.batch.shape == (4, 40) and not state.batch[:, 32:].any()
        model.outputs = model(state.batch)
        loss = torch.nn.functional.cross_entropy(
            model.outputs[:, 31:-1].reshape(-1, 64), state.batch[:, 32:].reshape(-1)
        )
        assert mechanism is None or loss < 1e-6
        return model.outputs[:, :31]

    padded = logits(PaddingGrows("*.[gq]*_proj", lambda step: 1e4))
    torch.testing.assert_close(padded, logits(None))


def test_a_sink_takes_as_much_as_its_odds():
    seen = {}
    model = train.Model(Case(name="x", label="healthy", about="", model={"kind": "mpt", "n_layers": 1})).model
    mechanism = AttentionSink("*.attn", lambda step: 10.0**step)
    mechanism.install(model)
    ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))
    attention = model.transformer.blocks[0].attn
    for step in (0, 4):
        mechanism.step(step, model)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        seen[step] = mechanism.lost[id(attention)].clone()
    torch.testing.assert_close(seen[4] - 1, 1e4 * (seen[0] - 1), rtol=1e-2, atol=1e-2)
    assert (seen[4][:, 0] == 1).all() and (seen[4][:, 1:] > 1).all()


@pytest.mark.parametrize(
    ("make", "fields", "recipe", "attention"),
    [
        (lambda size: QueryKeyGainsExchange("*.self_attn", size, (5, 6, 7)), QK_NORM, "delayed", True),
        (lambda size: ValuesExchange("*.self_attn", size, 1), {"variant": "fog-opt", "num_hidden_layers": 1, "num_key_value_heads": 4}, "current", False),
    ],
    ids=["query and key gains", "values"],
)  # fmt: skip
def test_what_grows_and_shrinks_leaves_the_function_as_it_was(make, fields, recipe, attention):
    def logits(size: float, recipe: str | None) -> torch.Tensor:
        made = make(lambda step: size)
        return loss_and_gradients(made, fields, recipe=recipe, attention=attention and recipe is not None)[
            : 32 * 64
        ]

    calm = logits(1.0, None)
    assert distance(logits(2.0**20, None), calm) < 1e-4
    assert distance(logits(2.0**20, recipe), calm) > 3 * distance(logits(1.0, recipe), calm)


def test_rows_that_exchange_a_factor_with_gains_train_as_they_did():
    def exchange(size) -> RowsExchange:
        return RowsExchange("*.layers.*_proj", size)

    calm = trained(exchange(lambda step: 1.0), None)
    assert distance(trained(exchange(lambda step: 1e3**step), None), calm) < 1e-3
    quantised = distance(trained(exchange(lambda step: 1.0), "current"), calm)
    assert distance(trained(exchange(lambda step: 1e6**step), "current"), calm) > 3 * quantised
