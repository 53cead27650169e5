"""``run_log`` on two gloo ranks through the composer launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundry_fp8.report.runs import read_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("multiprocess")]


def test_rank_0_alone_writes_and_says_how_many_ranks_there_are(tmp_path):
    log = tmp_path / "run_log.jsonl"
    launcher = Path(sys.executable).with_name("composer")
    worker = Path(__file__).with_name("run_run_log.py")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [launcher, "-n", "2", str(worker), str(log)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    read = read_run(log)
    assert (read.devices, read.nodes, read.problems) == (2, 1, [])
    assert read.step.tolist() == [1, 2]
    assert read.metrics["rank"].values.tolist() == [0, 0]
