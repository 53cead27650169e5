"""FP8 through LLM Foundry on two gloo ranks: DDP and FSDP2."""

import json

import pytest

from tests.integration.foundry_runs import make_data
from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess
CASES = ("fsdp2-mxfp8", "fsdp2-nvfp4", "fsdp2-delayed", "ddp-delayed", "ddp-mxfp8")


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_resume_and_load_back(case, tmp_path):
    root = make_data(tmp_path)
    launch.run("run_fp8_training.py", 2, root, tmp_path, case, imports=launch.FOUNDRY)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert "error" not in found, found["error"]
        assert found["ran_fp8"]
        assert found["scales_agree"]
        assert found["resume_is_bit_exact"]
        assert found["loads_into_high_precision"]
        assert found.get("high_precision_loads_into_fp8", True)
