"""AdamW with 8-bit moments on two gloo ranks, sharded and not."""

import json

import pytest

from tests.integration.foundry_runs import make_data
from tests.multiprocess import launch

pytest.importorskip("torchao")  # which the modern stack lacks
pytestmark = [pytest.mark.multiprocess, pytest.mark.full]


def test_two_ranks_resume_bit_exactly_or_are_refused(tmp_path):
    root = make_data(tmp_path)
    launch.run("run_low_bit_adamw.py", 2, root, tmp_path, imports=launch.FOUNDRY)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert "cannot be saved under FSDP1" in found.pop("fsdp1")
        assert len(found) == 4
        for name, run in found.items():
            assert run["bit_exact"], (name, run)
            assert run["in 8 bits"] == run["could be"] > 0.8 * run["in all"], (name, run)
