"""``run_log`` on two gloo ranks; in the full tier through the composer launcher."""

import pytest

from foundry_fp8.report.runs import read_run
from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("start", ["forked", pytest.param("composer", marks=pytest.mark.full)])
def test_rank_0_alone_writes_and_says_how_many_ranks_there_are(tmp_path, start):
    log = tmp_path / "run_log.jsonl"
    if start == "composer":
        launch.through_composer("run_run_log.py", log)
    else:
        launch.run("run_run_log.py", 2, log, imports=launch.COMPOSER)
    read = read_run(log)
    assert (read.devices, read.nodes, read.problems) == (2, 1, [])
    assert read.step.tolist() == [1, 2]
    assert read.metrics["rank"].values.tolist() == [0, 0]
