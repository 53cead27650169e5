"""``foundry-fp8 selftest``: stages that survive each other, claims that are judged by what was shown."""

import importlib.util
import json
import re
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import foundry_fp8
from foundry_fp8.cli.main import app
from foundry_fp8.cli.selftest import stages
from foundry_fp8.cli.selftest.claims import CLAIMS, judge
from foundry_fp8.cli.selftest.stages import Outcome, Stage, run_stages, stages_of

ROOT = Path(foundry_fp8.__file__).parents[1]


def script(name, code, limit=20.0, **options):
    return Stage(name=name, command=(sys.executable, "-c", code), limit_s=limit, **options)


def test_a_stage_that_fails_or_hangs_takes_no_other_with_it(tmp_path):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    started = time.monotonic()
    found = run_stages(
        [
            script("fails", "print('half'); raise SystemExit('out of memory')"),
            script("hangs", child, limit=0.5),
            script("works", 'print("noise"); print(\'{"rows": [1]}\')'),
        ],
        tmp_path,
        60,
        dry=True,
    )
    assert [o.state for o in found] == ["failed", "out of time", "passed"]
    assert "out of memory" in found[0].why and found[2].result == {"rows": [1]}
    assert time.monotonic() - started < 40  # the child's child ended too, and nothing waited for it


def test_what_the_budget_does_not_reach_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "checkout", lambda: None)
    found = run_stages(
        [
            script("slow", "import time; time.sleep(60)"),
            script("late", ""),
            script("tests", "", needs_checkout=True),
        ],
        tmp_path,
        0.5,
        dry=True,
    )
    assert [o.state for o in found] == ["out of time", "not reached", "not reached"]
    assert "were over" in found[1].why and "checkout" in found[2].why


def test_every_claim_is_in_its_document_and_its_stages_exist():
    names = {stage.name for stage in stages_of(Path("x"), dry=False)}
    for claim in CLAIMS:
        text = re.sub(r"\s+", " ", (ROOT / claim.document).read_text())
        assert claim.quote in text, claim.quote
        assert set(claim.stages) <= names, claim.quote


def test_the_limits_leave_a_first_verdict_early():
    """Doctor, kernels and the network, on which the rest stands, come first; what one GPU alone runs comes last."""
    found = stages_of(Path("x"), dry=False)
    assert [stage.name for stage in found[:3]] == ["doctor", "kernels", "network"]
    ranks = [i for i, stage in enumerate(found) if stage.every_rank]
    assert ranks == list(range(2, 2 + len(ranks)))
    assert {stage.needs for stage in found} - {""} <= {stage.name for stage in found}


def step(speedup, **changes):
    row = {"group": "llama3-8b 1 blocks", "variant": "native block eager", "speedup": speedup} | changes
    return Outcome(stage="step", state="passed", result={"machine": {"smoke": False}, "rows": [row]})


def verdict(outcomes, quote):
    return next(v for v in judge(outcomes) if quote in v.claim.quote)


def test_claims_are_confirmed_refuted_or_not_reached():
    block = "larger models and long runs on Hopper"
    assert verdict([step(1.1)], block).word == "confirmed"
    slower = verdict([step(0.8)], block)
    assert slower.word == "refuted" and "0.80 x BF16" in slower.figures
    assert verdict([], block).word == "not reached"
    assert verdict([step(1.1, variant="native current eager")], block).word == "not reached"
    tiny = Outcome(stage="step", state="passed", result={"machine": {"smoke": True}, "rows": []})
    assert verdict([tiny], block).word == "not reached"
    auto = "leaves layers in BF16 that a size rule predicts"
    linear = {"group": "llama3-8b gate, up", "variant": "native current eager"}
    assert verdict([step(0.9, **linear)], auto).word == "refuted"
    assert verdict([step(1.3, **linear)], auto).word == "confirmed"
    late = Outcome(stage="tests of the kernels", state="out of time", why="ended after 90 s")
    assert verdict([late], "every kernel gives").word == "not reached"
    wrong = {
        "recipes": {
            "block": {"state": "wrong", "why": "data_t of x is 3"},
            "current": {"state": "right", "why": ""},
        }
    }
    kernels = verdict([Outcome(stage="kernels", state="failed", result=wrong)], "Inf and NaN")
    assert kernels.word == "refuted" and "data_t of x is 3" in kernels.figures


def test_without_a_gpu_it_says_so_and_names_the_way(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(app, ["selftest"])
    assert result.exit_code == 2 and "--dry" in result.output


def dry_run(folder, *arguments):
    result = CliRunner().invoke(app, ["selftest", "--dry", "--output", str(folder), *arguments])
    found = json.loads((folder / "selftest.json").read_text())
    page = (folder / "selftest.html").read_text()
    return result, {s["stage"]: s for s in found["stages"]}, found, page


@pytest.mark.parametrize(
    "real",
    [False, pytest.param(True, marks=pytest.mark.full)],
    ids=["with another program in its place", "doctor"],
)
def test_dry_run_of_what_decides_first(real, tmp_path, monkeypatch):
    if not real:
        monkeypatch.setattr(stages, "stages_of", lambda output, dry: [script("doctor", "print('{}')")])
    result, found, whole, page = dry_run(tmp_path, "--only", "doctor")
    assert found["doctor"]["state"] == "passed", found
    assert result.exit_code == 0, result.output
    said = {c["verdict"] for c in whole["claims"]}
    assert said == {"not reached"}  # nothing is claimed of what was not measured
    assert "Inf and NaN stay visible" in page


@pytest.mark.full
@pytest.mark.integration
def test_dry_run_of_every_stage(tmp_path):
    _, found, whole, _ = dry_run(tmp_path, "--budget", "1700")
    expected = set() if importlib.util.find_spec("transformer_engine") else {"transformer engine"}
    missed = {name: (s["state"], s["why"]) for name, s in found.items() if s["state"] != "passed"}
    assert set(missed) == expected, missed
    assert set(found) == {stage.name for stage in stages_of(tmp_path, dry=True)}
    assert whole["versions"]["torch"]
    assert {e["state"] for e in found["kernels"]["result"]["recipes"].values()} == {"interpreted"}
    assert set(found["training"]["result"]["runs"]) == {"high-precision", "current"}
