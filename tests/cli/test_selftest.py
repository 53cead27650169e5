"""``foundry-fp8 selftest``: stages that survive each other, claims that are judged by what was shown."""

import dataclasses
import importlib
import json
import math
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import foundry_fp8
from foundry_fp8.backends.size_rule import Rates
from foundry_fp8.cli.main import app
from foundry_fp8.cli.selftest import stages
from foundry_fp8.cli.selftest.claims import CLAIMS, judge
from foundry_fp8.cli.selftest.kernels import measured_rates
from foundry_fp8.cli.selftest.stages import Outcome, Stage, run_stages, stages_of
from tests.kernels.interpreter import interpret

command = importlib.import_module("foundry_fp8.cli.selftest.command")
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


def test_what_the_budget_does_not_reach_is_said(tmp_path):
    slow = script("slow", "import time; time.sleep(60)")
    found = run_stages([slow, script("late", "")], tmp_path, 0.5, dry=True)
    assert [o.state for o in found] == ["out of time", "not reached"] and "were over" in found[1].why


def test_every_claim_is_on_the_page_and_of_a_stage():
    names = {stage.name for stage in stages_of(Path("x"), dry=False)}
    page = re.sub(r"\s+", " ", (ROOT / "docs/reference/selftest.md").read_text())
    assert {claim.stage for claim in CLAIMS} == names - {"doctor"}
    assert [claim.quote for claim in CLAIMS if claim.quote not in page] == []


def test_the_limits_leave_a_first_verdict_early():
    """Doctor, kernels and the network, on which the rest stands, come first; what one GPU alone runs comes last."""
    found = stages_of(Path("x"), dry=False)
    assert [stage.name for stage in found[:3]] == ["doctor", "kernels", "network"]
    ranks = [i for i, stage in enumerate(found) if stage.every_rank]
    assert ranks == list(range(2, 2 + len(ranks)))
    assert {stage.needs for stage in found} - {""} <= {stage.name for stage in found}


@pytest.mark.parametrize(
    ("state", "ok", "word", "figures"),
    [
        ("passed", True, "confirmed", "block: right"),
        ("failed", False, "refuted", "block: right"),
        ("failed", None, "refuted", "kernels: out of memory"),
        ("not reached", None, "not reached", "out of memory"),
    ],
)
def test_claims_are_confirmed_refuted_or_not_reached(state, ok, word, figures):
    result = None if ok is None else {"rows": [{"check": "block", "ok": ok, "figures": "right"}]}
    outcome = Outcome(stage="kernels", state=state, why="out of memory", result=result)
    verdict, network, *_ = judge([outcome])
    assert verdict.word == word and figures in verdict.figures and network.word == "not reached"
    assert (judge([outcome], dry=True)[0].word == word) == (word != "confirmed")
    late = Outcome(stage="training", state="out of time", why="ended after 90 s")
    assert judge([late])[-1].word == "not reached"


def test_without_a_gpu_it_says_so_and_names_the_way(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(app, ["selftest"])
    assert result.exit_code == 2 and "--dry" in result.output


def dry_run(folder, *arguments):
    result = CliRunner().invoke(app, ["selftest", "--dry", "--output", str(folder), *arguments])
    found = json.loads((folder / "selftest.json").read_text())
    return result, {s["stage"]: s for s in found["stages"]}, found


@pytest.mark.parametrize(
    "real",
    [False, pytest.param(True, marks=pytest.mark.full)],
    ids=["with another program in its place", "doctor"],
)
def test_dry_run_of_what_decides_first(real, tmp_path, monkeypatch):
    if not real:
        monkeypatch.setattr(stages, "stages_of", lambda output, dry: [script("doctor", "print('{}')")])
    result, found, whole = dry_run(tmp_path, "--only", "doctor")
    assert found["doctor"]["state"] == "passed", found
    assert result.exit_code == 0, result.output
    said = {c["verdict"] for c in whole["claims"]}
    assert said == {"not reached"}  # nothing is claimed of what was not measured
    assert "NaN and Inf stay visible" in " ".join(result.output.split())


@pytest.mark.full
@pytest.mark.integration
def test_dry_run_of_every_stage(tmp_path):
    _, found, whole = dry_run(tmp_path, "--budget", "1700")
    missed = {name: (s["state"], s["why"]) for name, s in found.items() if s["state"] != "passed"}
    assert not missed
    assert set(found) == {stage.name for stage in stages_of(tmp_path, dry=True)}
    assert whole["versions"]["torch"]
    kernels = {row["check"]: row["figures"] for row in found["kernels"]["result"]["rows"]}
    assert "no kernels for the scales of nvfp4" in kernels.pop("nvfp4")
    assert set(kernels.values()) == {"interpreted"}
    assert "x the tokens per second" in found["training"]["result"]["rows"][0]["figures"]


def test_what_is_measured_is_of_the_rates_and_a_positive_number(monkeypatch):
    interpret(monkeypatch)
    found = measured_rates(torch.device("cpu"), size=128, seconds=0.001)
    assert {"bf16", "fp8", "bandwidth"} < set(found) <= {field.name for field in dataclasses.fields(Rates)}
    assert all(0 < rate < math.inf for rate in found.values())


def test_the_kernels_rates_are_written_and_a_dry_run_has_none(tmp_path):
    rates = {"gpu": "NVIDIA H100 80GB HBM3", "bf16": 7e14}
    for rates_of_stage in (rates, None):
        outcome = Outcome(stage="kernels", state="passed", result={"rows": [], "rates": rates_of_stage})
        found = command._write(tmp_path, [outcome], [], 0.0, False)
        assert (
            found["rates"] == rates_of_stage == json.loads((tmp_path / "selftest.json").read_text())["rates"]
        )
    assert command._write(tmp_path, [], [], 0.0, False)["rates"] is None
