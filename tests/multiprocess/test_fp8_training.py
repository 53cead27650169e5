"""FP8 through LLM Foundry on two gloo ranks: DDP and FSDP2."""

import json

import pytest

from tests.integration.foundry_runs import make_data
from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess
CASES = [f"{wrapper}-{recipe}" for wrapper in ("ddp", "fsdp2") for recipe in ("delayed", "mxfp8")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = make_data(tmp_path_factory.mktemp("data"))
    out = tmp_path_factory.mktemp("out")
    launch.run("run_fp8_training.py", 2, root, out, imports=launch.FOUNDRY)
    return [json.loads((out / f"rank{r}.json").read_text()) for r in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_resume_and_load_back(results, case):
    for rank in (0, 1):
        found = results[rank][case]
        assert "error" not in found, found["error"]
        assert found["ran_fp8"]
        assert found["scales_agree"]
        assert found["resume_is_bit_exact"]
        assert found["loads_into_high_precision"]
        assert found.get("high_precision_loads_into_fp8", True)
