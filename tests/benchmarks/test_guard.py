"""The guard's labelled runs: causes harm FP8 alone, verdicts name what is wrong, and a case trains in each variant."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from guard import CASES, Case, activations, model_of, super_weight, swiglu_alignment, train, wrong

from foundry_fp8.surgery.apply import apply_fp8


def logits(cause, size, *, fp8):
    model = model_of(Case(label="healthy", about="", seed=1)).train()
    set_size = cause(lambda step: size)(model)
    if fp8:
        apply_fp8(model, recipe="current", backend="emulated")
    set_size(0)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, use_cache=False).logits.detach()


@pytest.mark.parametrize(
    "cause",
    [
        lambda size: activations("*.layers.*_proj", size),
        lambda size: activations("*.gate_up_proj", size, first_token=True),
        lambda size: swiglu_alignment("*.mlp", size),
        lambda size: super_weight("*.layers.*_proj", size),
    ],
    ids=["activations", "first token", "swiglu", "super weight"],
)
def test_a_cause_harms_fp8_and_leaves_high_precision_as_it_was(cause):
    calm = logits(cause, 0.0, fp8=False)
    error = {
        (size, fp8): float((logits(cause, size, fp8=fp8) - calm).norm() / calm.norm())
        for size in (0.0, 3e6)
        for fp8 in (False, True)
    }
    assert error[3e6, False] < 1e-3  # float32 rounds it, too
    assert error[3e6, True] > 2 * error[0.0, True]


def test_a_verdict_names_what_is_not_as_labelled():
    level, high = [2.0] * 30, [3.0] * 30
    diverges, healthy = Case(label="diverges", about="", onset=5), Case(label="healthy", about="")
    events = [{"batch": 10, "action": what} for what in ("alarm", "demote")]
    assert wrong(diverges, level, high, level, events) == wrong(healthy, level, level, level, []) == []
    assert wrong(diverges, level, level, [float("nan")] * 30, []) == [
        "FP8 alone ends less than 5 % above high precision", "no alarm", "with the guard the end is more than 5 % above high precision",
    ]  # fmt: skip
    early = wrong(dataclasses.replace(diverges, onset=20), level, high, level, events)
    assert early == ["an alarm before the cause"]
    assert "demotions of what FP8 does not harm" in wrong(healthy, level, level, level, events)


@pytest.mark.parametrize(
    ("name", "variant"), [("bad_batch", "high"), ("swiglu_alignment", "fp8"), ("eight_experts", "guarded")]
)
def test_a_case_trains_in_each_variant(name, variant):
    losses, events = train(dataclasses.replace(CASES[name], steps=3), variant, interval=1)
    assert len(losses) == 3 and all(loss < 5.0 for loss in losses) and events == []
