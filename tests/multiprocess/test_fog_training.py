"""FOG with FP8 attention on two gloo ranks: FSDP2 by block, one amax state."""

import json

import pytest

from tests.integration.foundry_runs import make_data
from tests.multiprocess import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.full]


def test_two_ranks_train_fog_with_fp8_attention(tmp_path):
    root = make_data(tmp_path)
    launch.run("run_fog_training.py", 2, root, tmp_path, imports=launch.FOUNDRY)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert "error" not in found, found["error"]
        assert found["scales_agree"] and found["all_finite"] and found["sharded_by_block"]
        assert found["loss"] < 6.2
        # Near what it was initialised to: 1/sqrt(2 layers), ln(e^0.8 - 1), sigma.
        assert found["gain"] == pytest.approx(2**-0.5, abs=0.05)
        assert found["slope"] == pytest.approx(0.2034, abs=0.05)
        assert found["embedding_std"] == pytest.approx(0.02, rel=0.1)
