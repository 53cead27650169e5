"""FSDP2 with ``parameters: e4m3`` and FP8 linears: what is rounded twice, and what is not."""

import pytest

from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess


def test_outputs_and_gradients_are_those_of_a_gather_in_high_precision():
    results = launch.run("run_fp8_gather.py", 3)
    damaged = results.pop("damaged")
    for name, found in results.items():
        tensorwise = name != "block"
        # Three steps of two microbatches: weights change, gathers of the backward run outside of autocast.
        assert found["equal"] == [tensorwise] * 3, name
        assert found["sent"]["all_gather"] == found["wanted_gather"], name
        assert found["sent"]["all_reduce"] == (found["wanted_amaxes"] if tensorwise else 0), name
        assert all(0.02 < e < 0.08 for e in found["first_gradients"]) or tensorwise, name  # rounded twice
        # Evaluation in high precision sees weights in blocks: one rounding to 3 mantissa bits a layer.
        assert 0.01 < found["evaluation_error"] < 0.06, name
    assert damaged["equal"] == [True] * 3 and damaged["visible"], "an Inf in one rank's rows is seen by all"
