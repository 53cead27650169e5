"""FP8 layers in Composer's tensor-parallel plan are refused by name before anything is spent; beside it they run."""

import pytest

from tests.multiprocess import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]


def test_layers_of_the_plan_are_refused_and_others_are_not():
    from tests.multiprocess.tensor_parallel import refusals

    for ours, left_out in launch.call(refusals, 2, {}, {"exclude": ["up", "down"]}, imports=launch.COMPOSER):
        assert ours[0].startswith("ConfigError: algorithms.fp8: 2 converted layers (up, down"), ours
        assert "layer plan" in ours[0] and "algorithms.fp8.exclude" in ours[0]
        assert left_out == (None, ["last"])
