"""FOG with FP8 attention on two gloo ranks: FSDP2 by block, one amax state."""

import json

import pytest
import torch

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


def test_the_shipped_yaml_trains_in_two_shards_as_without(tmp_path):
    """Four ranks, FSDP1 over the other dimension; each pair reads the same sequences."""
    pytest.importorskip("llmfoundry")
    from tests.multiprocess.fog_tensor_parallel import trained

    root = make_data(tmp_path)
    whole, shards = (launch.call(trained, 2 * n, root, n, imports=launch.FOUNDRY) for n in (1, 2))
    loss, weights, flops = whole[0]
    loss2, weights2, flops2 = shards[0]
    assert loss2 == pytest.approx(loss, rel=1e-3) and flops2 * 2 == flops > 0
    # Four steps of AdamW move a weight of 0.02 by up to 0.0012.
    assert all((weights2[n] - w).norm() < 0.005 * w.norm() for n, w in weights.items())
    for _, others, _ in shards[1:]:
        assert all(torch.equal(others[n], w) for n, w in weights2.items())
