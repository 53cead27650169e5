"""The guard's suite: its cases are what they say, its stored runs are of them, and its counts are right."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import fingerprint
import held_out
import judge
import reliability
import tuned
from case import Case
from common import RESULTS
from mechanisms.first import Activations

CASES = [*tuned.CASES, *held_out.CASES]


def test_names_are_unique_and_there_are_enough_of_each():
    assert len({case.name for case in CASES}) == len(CASES)
    assert (
        min(sum(case.diverges for case in tuned.CASES), sum(not case.diverges for case in tuned.CASES)) >= 16
    )
    assert sum(not case.diverges for case in held_out.CASES) >= 8


def test_stored_labels_hold():
    stored = json.loads((RESULTS / "guard_labels.json").read_text())["cases"]
    assert set(stored) == {case.name for case in CASES}
    for case in CASES:
        high, fp8, calm = (
            [float(x) for x in stored[case.name]["losses"][k]] for k in ("high", "fp8", "reference")
        )
        assert len(high) == len(fp8) == len(calm) == case.steps
        assert stored[case.name]["label"] == case.label
        assert judge.label(case, high, fp8, calm)["holds"], case.name


def test_stored_runs_are_of_the_cases_as_they_are_written():
    stored = json.loads((RESULTS / "guard.json").read_text())["runs"]
    assert stored.keys() == {case.name for case in CASES}
    assert {case.name: fingerprint.of_case(case) for case in CASES} == {
        name: one["case"] for name, one in stored.items()
    }


def test_a_case_is_told_by_what_it_runs(tmp_path, monkeypatch):
    """By its own words, by its file's constants and by the mechanisms that its file imports; not by what it says of itself, nor by other cases."""
    written = {
        "mechanism_a.py": "class A:\n    'Grows.'\n    size = 1\n",
        "half.py": "from mechanism_a import A\nLONG = 3\nCASES = [Case(name='one', about='x', steps=LONG), Case(name='two')]\n",
    }
    monkeypatch.setattr(fingerprint, "__file__", str(tmp_path / "fingerprint.py"))
    one = Case(name="one", label="healthy", about="")

    def told(**changed):
        for cached in (fingerprint._code, fingerprint._cases):
            cached.cache_clear()
        for name, text in {**written, **changed}.items():
            (tmp_path / name).write_text(text)
        return fingerprint.of_case(one)

    as_it_is, half = told(), written["half.py"]
    for same in ("about='x'", "about='y'"), ("name='two'", "name='three'"), ("LONG = 3", "LONG = 3  # steps"):
        assert told(**{"half.py": half.replace(*same)}) == as_it_is
    for other in ("steps=LONG", "steps=4"), ("LONG = 3", "LONG = 4"):
        assert told(**{"half.py": half.replace(*other)}) != as_it_is
    assert told(**{"mechanism_a.py": "class A:\n    size = 1\n"}) == as_it_is
    assert told(**{"mechanism_a.py": "class A:\n    size = 2\n"}) != as_it_is


def test_the_loss_leaves_its_band_where_it_does():
    case = Case(name="x", label="diverges", about="", onset=50, steps=100)
    high = [2.0] * 100
    noisy = [2.0 + 0.01 * (-1) ** step for step in range(100)]
    assert judge.departure(case, noisy, high) is None
    rising = [x * (1 if step < 70 else 1.05) for step, x in enumerate(noisy)]
    # The mean of ten passes 1 % with the third step of 5 %: 3 x 5 % / 10.
    assert judge.departure(case, rising, high) in (71, 72)
    assert judge.departure(case, [*noisy[:70], *[float("nan")] * 30], high) == 70
    assert (
        judge.departure(dataclasses.replace(case, onset=90), [2.0] * 60 + [3.0] * 5 + [2.0] * 35, high)
        is None
    )


def test_a_verdict_counts_what_is_false():
    case = Case(
        name="x", label="diverges", about="", onset=50, ends=80, sick=(0,), touched="*.mlp.*", steps=100
    )

    def event(batch, action, unit="layer_000"):
        return {"batch": batch, "action": action, "unit": unit, "signal": "kurtosis"}

    events = [
        event(40, "alarm"), event(40, "demote"), event(60, "alarm"), event(60, "demote"), event(61, "demote", "model.layers.1.mlp.down_proj"),
        event(70, "promote"), event(70, "promote", "layers.0.mlp.down_proj"),
        event(70, "promote", "layers.0.self_attn.o_proj"), event(90, "promote"), event(91, "renew"),
    ]  # fmt: skip
    row = judge.verdict(case, 65, [2.0] * 100, [2.0] * 100, events, [1.0] * 60 + [0.0] * 40)
    assert (row["first_alarm"], row["lead_steps"]) == (60, 6)
    assert (row["false_alarms"], row["false_demotions"]) == (1, 2)
    assert (row["promotions"], row["promotions_while_sick"]) == (4, 2)
    assert row["renewals"] == 1 and row["time_in_fp8"] == 0.6 and row["guarded_above_high"] == 0


def test_first_alarms_are_judged_by_horizon():
    def row(departure, *alarms, onset=40, lead=None):
        events = [{"batch": batch, "action": "alarm", "signal": "loss"} for batch in alarms]
        return {
            "departure": departure,
            "onset": onset,
            "events": events,
            "lead_steps": lead,
            "losses": [2.0] * 200,
        }

    # In time; before the cause, and again in time; in a healthy run; too late; never.
    rows = [
        row(100, 90, 95, lead=11),
        row(100, 20, 60, lead=41),
        row(None, 50),
        row(100, 110, lead=-9),
        row(100),
    ]
    assert reliability.precision(rows, 10) == (0, 3) and reliability.precision(rows, 11) == (1, 3)
    assert reliability.precision(rows, 400) == (1, 3)
    assert reliability.recall(rows, 11) == (1, 4) and reliability.recall(rows, 41) == (2, 4)
    assert reliability.chance(rows, 50) == 4 * 50 / (4 * 100 + 200)


def test_the_interval_is_clopper_and_pearsons():
    low, high = reliability.interval(5, 8)
    # Its definition: at the ends, a result as far out as this one has 2.5 %.
    assert sum(math.comb(8, k) * low**k * (1 - low) ** (8 - k) for k in range(5, 9)) == pytest.approx(0.025)
    assert sum(math.comb(8, k) * high**k * (1 - high) ** (8 - k) for k in range(6)) == pytest.approx(0.025)
    assert reliability.interval(0, 8)[0] == 0.0 and reliability.interval(8, 8)[1] == 1.0


@pytest.mark.integration
def test_a_run_is_the_same_with_a_guard_that_only_warns():
    """So that what the guard saw first can be set against the loss of FP8 alone."""
    import train

    case = next(case for case in tuned.CASES if case.name == "bad_batch")
    mechanism = Activations("*_proj", lambda step: 4e5 if step == 20 else 0.0)
    short = dataclasses.replace(case, steps=30, mechanism=lambda: mechanism)
    alone = train.train(short, "fp8")
    watched = train.train(short, "guarded", {"interval": 1, "actions": ["warn"]})
    assert watched.losses == alone.losses and len(alone.losses) == 30
    assert any(event["action"] == "alarm" and event["batch"] > 20 for event in watched.events)
    assert watched.linears_in_fp8 == [1.0] * 30


@pytest.mark.integration
def test_attention_that_all_goes_to_one_key_is_demoted_for_its_output():
    """Its probabilities beside that key are flushed, and of its operands nothing is."""
    import train
    from mechanisms.ninth import AttentionSink

    sink = next(case for case in tuned.CASES if case.name == "attention_sink")
    mechanism = AttentionSink("*.attn", lambda step: 1e8 if step >= 16 else 1.0)
    short = dataclasses.replace(sink, steps=22, onset=16, mechanism=lambda: mechanism)
    run = train.train(short, "guarded", {"interval": 1})
    first = min(event["batch"] for event in run.events if event["action"] == "demote")
    told = {
        event["unit"]
        for event in run.events
        if event["signal"] == "product_noise of o" and event["batch"] == first
    }
    demoted = {
        e["unit"] for e in run.events if e["action"] == "demote" and e["why"].startswith("product_noise of o")
    }
    assert len(demoted) == 2 and demoted == told
