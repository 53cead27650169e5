"""``selftest`` on two ranks with a failure planted in one stage: the right verdict, within the stage's limit."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foundry_fp8.cli.selftest import verdict as verdicts
from foundry_fp8.cli.selftest.claims import judge
from foundry_fp8.cli.selftest.stages import run_stages, stages_of
from foundry_fp8.cli.selftest.supervisors import Supervisors
from foundry_fp8.distributed.compression.config import CompressionConfig
from foundry_fp8.run.settings import Run
from foundry_fp8.surgery.fp8_config import FP8Config

pytestmark = [pytest.mark.multiprocess]
LIMIT_S = 300.0
CHECKOUT = Path(__file__).parents[2]


def run(folder, failure, *names, limit=LIMIT_S):
    """The outcomes and verdicts of stages by name; ``failure`` is planted in the last of them."""
    chosen = []
    for stage in stages_of(folder, dry=True):
        if stage.name in names:
            command = stage.command
            if stage.name == names[-1] or failure == "no_nccl":
                command = (sys.executable, "-m", "tests.cli.planted", failure, *command[3:])
            where = {**stage.environment, "PYTHONPATH": str(CHECKOUT)}
            chosen.append(dataclasses.replace(stage, command=command, limit_s=limit, environment=where))
    outcomes = run_stages(chosen, folder / "logs", 10 * LIMIT_S, dry=True, supervisors=Supervisors(2))
    words = {verdict.claim.stage: verdict for verdict in judge(outcomes, dry=True)}
    return {outcome.stage: outcome for outcome in outcomes}, words


def test_a_rank_that_dies(tmp_path):
    found, words = run(tmp_path, "dead_rank", "network")
    assert found["network"].state == "failed" and "rank 1 signal 9" in found["network"].why
    assert words["network"].word == "refuted" and "rank 1 signal 9" in words["network"].figures


@pytest.mark.full
def test_a_rank_that_hangs(tmp_path):
    started = time.monotonic()
    found, words = run(tmp_path, "hanging_rank", "network", limit=40.0)
    assert time.monotonic() - started < 80
    why = found["network"].why
    assert found["network"].state == "out of time" and words["network"].word == "refuted"
    assert "rank 1 was at cli/planted.py" in why and "hang" in why  # and its peer waits in a collective:
    assert "rank 0 was at" in why and "cluster/network.py" in why


@pytest.mark.full
def test_no_nccl(tmp_path):
    found, words = run(tmp_path, "no_nccl", "network", "ddp")
    assert "doesn't have NCCL" in found["network"].why and words["network"].word == "refuted"
    assert found["ddp"].state == words["ddp"].word == "not reached" and "network: failed" in found["ddp"].why


@pytest.mark.full
def test_a_slow_link(tmp_path):
    found, words = run(tmp_path, "slow_link", "network")
    assert found["network"].state == "failed" and words["network"].word == "refuted"
    assert "links inside a node: " in words["network"].figures and "1 to 0: " in words["network"].figures
    assert "0 to 1" not in words["network"].figures


@pytest.mark.full
def test_a_wrong_kernel(tmp_path):
    _, words = run(tmp_path, "wrong_kernel", "network", "collectives")
    assert words["network"].word == "not reached" and "rehearsed" in words["network"].figures
    assert words["collectives"].word == "refuted" and "int8" in words["collectives"].figures


@pytest.mark.full
@pytest.mark.parametrize("failure", ["wrong_gradient", "nan"])
def test_a_wrong_gradient(failure, tmp_path):
    _, words = run(tmp_path, failure, "ddp")
    assert words["ddp"].word == "refuted" and "gradients: " in words["ddp"].figures
    assert ("nan" in words["ddp"].figures) == (failure == "nan")
    assert "enabled: false" in words["ddp"].claim.avoid


@pytest.mark.full
def test_out_of_memory_on_one_rank(tmp_path):
    found, words = run(tmp_path, "out_of_memory", "ddp")
    assert "rank 1 exit 1" in found["ddp"].why and "out of memory" in words["ddp"].figures
    assert words["ddp"].word == "refuted"


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "composer"])
def test_under_a_launcher(launcher, tmp_path):
    """One supervisor a rank."""
    program = Path(sys.executable).with_name(launcher)
    options = ["-n", "2"] if launcher == "composer" else ["--nproc-per-node", "2"]
    arguments = ["-m", "foundry_fp8.cli.main", "selftest", "--dry", "--only", "network,collectives"]
    output = tmp_path / "out"
    ended = subprocess.run(
        [program, *options, *arguments, "--output", output],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = json.loads((output / "selftest.json").read_text())
    assert {s["stage"]: s["state"] for s in found["stages"]} == {"network": "passed", "collectives": "passed"}


def test_doctor_warns_of_what_was_refuted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert verdicts.latest() is None and verdicts.warnings_for(Run(fp8=FP8Config())) == []
    claims = [
        {
            "claim": "resumes",
            "verdict": "refuted",
            "figures": "differ",
            "next": "Do not.",
            "keys": ["algorithms.fp8"],
        },
        {
            "claim": "compresses",
            "verdict": "refuted",
            "figures": "",
            "next": "",
            "keys": ["algorithms.compressed_communication"],
        },
        {"claim": "fine", "verdict": "confirmed", "figures": "", "next": "", "keys": ["algorithms.fp8"]},
    ]
    verdicts.keep({"date": "2026-11-26T10:00:00", "claims": claims})
    (only,) = verdicts.warnings_for(Run(fp8=FP8Config()))
    assert only == "resumes: refuted on this machine on 2026-11-26 (differ). Do not."
    assert verdicts.warnings_for(Run(fp8=FP8Config(enabled=False))) == []
    both = Run(fp8=FP8Config(), compressed_communication=CompressionConfig())
    assert len(verdicts.warnings_for(both)) == 2
