"""``run_log`` on two gloo ranks through the composer launcher."""

import pytest

from foundry_fp8.report.runs import read_run
from tests.multiprocess.launch import through_composer

pytestmark = pytest.mark.multiprocess


def test_rank_0_alone_writes_and_says_how_many_ranks_there_are(tmp_path):
    log = tmp_path / "run_log.jsonl"
    through_composer("run_run_log.py", log, timeout=300)
    read = read_run(log)
    assert (read.devices, read.nodes, read.problems) == (2, 1, [])
    assert read.step.tolist() == [1, 2]
    assert read.metrics["rank"].values.tolist() == [0, 0]
