"""µnit-scaled models on two gloo ranks: groups survive the wrapping, FP8 trains, resuming is bit-exact."""

import json

import pytest

from tests.integration.foundry_runs import make_data
from tests.multiprocess import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.full]


def test_two_ranks_train_and_resume_bit_exactly(tmp_path):
    root = make_data(tmp_path)
    launch.run("run_mus_training.py", 2, root, tmp_path, imports=launch.FOUNDRY)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(found) == 4
        for name, run in found.items():
            assert "error" not in run, f"{name}: {run['error']}"
            assert run["converted"] == 8 and run["bit_exact"] and run["loss"] < 6.2, (name, run)
            assert run["rates"] == {"hidden": 0.04, "other": 0.08}, name
            assert run["numbers"] == {"hidden": 8, "other": 7}, name
