"""The guard's suite: its cases are what they say, its mechanisms leave high precision as it was, and its counts are right."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import judge
from case import Case
from cases import CASES
from common import RESULTS
from mechanisms.common_to_all_tokens import ActivationMean, RankOne, RunningMeans, Spread
from mechanisms.outliers import Activations, GainAmplifier, KeyOutliers, SuperWeight, SwigluAlignment
from mechanisms.rescalings import QueriesGrowKeysShrink

from foundry_fp8.models.fog import FogConfig, FogForCausalLM
from foundry_fp8.surgery.apply import apply_fp8

NAMED = {case.name: case for case in CASES}


def test_names_are_unique_and_there_are_enough_of_each():
    assert len(NAMED) == len(CASES) <= 60
    labels = [case.label for case in CASES]
    assert labels.count("diverges") >= 30 and labels.count("diverges in both") == 3
    assert labels.count("healthy") >= 14 and sum(name.endswith("_small") for name in NAMED) >= 5


def test_labels_are_stored_of_all_cases():
    stored = json.loads((RESULTS / "guard_labels.json").read_text())["cases"]
    assert list(stored) == list(NAMED)
    for name, case in NAMED.items():
        losses = {run: [float(x) for x in values] for run, values in stored[name]["losses"].items()}
        assert {len(values) for values in losses.values()} == {case.steps}
        assert stored[name]["label"] == case.label
        assert judge.label(case, **losses)["holds"], name


def logits(mechanism, *, fp8: bool, attention: bool = False) -> torch.Tensor:
    torch.manual_seed(0)
    model = FogForCausalLM(
        FogConfig(
            variant="llama3", vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=16, initializer_range=0.3,
        )
    )  # fmt: skip
    mechanism.install(model)
    if fp8:
        apply_fp8(model, recipe="current", attention=attention, backend="emulated")
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    mechanism.step(0, model)
    return model.train()(ids, use_cache=False).logits.detach()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("make", "grown", "attention"),
    [
        (lambda size: Activations("*.layers.*_proj", size), 3e6, False),
        (lambda size: Activations("*.gate_up_proj", size, share=None), 3e6, False),
        (lambda size: SwigluAlignment(0, size), 3e6, False),
        (lambda size: SuperWeight("*.layers.*_proj", size), 3e6, False),
        (lambda size: KeyOutliers("*.self_attn", size), 3e6, True),
        (lambda size: GainAmplifier("*.layers.*_proj", size), 3e6, False),
        (lambda size: QueriesGrowKeysShrink("*.self_attn", size), 3e6, False),
        (lambda size: ActivationMean("*.layers.*_proj", size), 300.0, False),
        (lambda size: RankOne("*.layers.*_proj", size), 100.0, False),
        (lambda size: RunningMeans("*.layers.*_proj", size), 100.0, False),
        (lambda size: Spread("*.layers.*_proj", size), 1e12, False),
    ],
    ids=["activations", "first token", "swiglu", "super weight", "keys", "gains", "queries", "mean", "rank one", "means", "spread"],
)  # fmt: skip
def test_a_mechanism_harms_fp8_and_leaves_high_precision_as_it_was(make, grown, attention):
    calm = logits(make(lambda step: 0.0), fp8=False)
    assert distance(logits(make(lambda step: grown), fp8=False), calm) < 1e-3  # float32 rounds it, too
    quantised = logits(make(lambda step: 0.0), fp8=True, attention=attention)
    affected = logits(make(lambda step: grown), fp8=True, attention=attention)
    assert distance(affected, calm) > 2 * distance(quantised, calm)


def test_the_loss_leaves_its_band_where_it_does():
    case = Case(name="x", label="diverges", about="", onset=50, steps=100)
    high = [2.0] * 100
    noisy = [2.0 + 0.01 * (-1) ** step for step in range(100)]
    assert judge.departure(case, noisy, high) is None
    rising = [x * (1 if step < 70 else 1.05) for step, x in enumerate(noisy)]
    # The mean of ten passes 1 % with the third step of 5 %: 3 x 5 % / 10.
    assert judge.departure(case, rising, high) in (71, 72)
    assert judge.departure(case, [*noisy[:70], *[float("nan")] * 30], high) == 70
    later = dataclasses.replace(case, onset=90)
    assert judge.departure(later, [2.0] * 60 + [3.0] * 5 + [2.0] * 35, high) is None


def test_a_verdict_counts_what_is_false():
    case = Case(
        name="x", label="diverges", about="", onset=50, ends=80, blocks=(0,), touched="*.mlp.*", steps=100
    )

    def event(batch, action, unit="layer_000"):
        return {"batch": batch, "action": action, "unit": unit}

    events = [
        event(40, "alarm"), event(40, "demote"), event(60, "alarm"), event(60, "demote"), event(61, "demote", "model.layers.1.mlp.down_proj"),
        event(70, "return"), event(70, "return", "layers.0.mlp.down_proj"),
        event(70, "return", "layers.0.self_attn.o_proj"), event(90, "return"),
    ]  # fmt: skip
    row = judge.verdict(case, 60, [2.0] * 100, [2.0] * 100, events, [1.0] * 60 + [0.0] * 40)
    assert (row["first_alarm"], row["lead_steps"]) == (60, 0)
    assert (row["false_alarms"], row["demotions"], row["false_demotions"]) == (1, 3, 2)
    assert (row["promotions"], row["promotions_while_affected"]) == (4, 2)
    assert row["time_in_fp8"] == 0.6 and row["guarded_above_high"] == 0
    counted = judge.summary([row, {**row, "label": "healthy"}])
    assert counted.startswith("1 of 1 runs") and "1 end at most 1 %" in counted
    assert "3 demotions in 1 healthy runs; 4 promotions" in counted


def test_blocks_are_found_in_the_names_of_units():
    units = ("layer_003", "model.layers.3.mlp.down_proj", "transformer.blocks.3.attn.Wqkv", "lm_head")
    assert [judge.block_of(unit) for unit in units] == [3, 3, 3, None]


@pytest.mark.integration
@pytest.mark.parametrize("variant", ["high", "fp8", "guarded"])
def test_a_case_trains_in_each_variant(variant):
    import train

    short = dataclasses.replace(NAMED["most_recent_of_two"], steps=3)
    run = train.train(short, variant, {"interval": 1, "rows": 64})
    assert len(run.losses) == 3 and all(loss < 5.0 for loss in run.losses)
    assert run.linears_in_fp8 == [0.0 if variant == "high" else 1.0] * 3
    assert bool(run.gaps) == (variant == "guarded")


@pytest.mark.integration
def test_a_run_is_the_same_with_a_guard_that_only_warns():
    """So that what the guard saw first can be set against the loss of FP8 alone."""
    import train

    mechanism = Activations("*_proj", lambda step: 4e5 if step == 10 else 0.0)
    short = dataclasses.replace(NAMED["bad_batch"], steps=15, mechanism=lambda: mechanism)
    alone = train.train(short, "fp8")
    watched = train.train(short, "guarded", {"interval": 1, "rows": 64, "actions": ["warn"]})
    assert watched.losses == alone.losses and len(alone.losses) == 15
    assert any(event["action"] == "alarm" and event["batch"] >= 10 for event in watched.events)
    assert watched.linears_in_fp8 == [1.0] * 15
