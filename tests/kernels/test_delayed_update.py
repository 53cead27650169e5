"""The one-launch update against ``DelayedScalingState.update``, bit for bit over several passes."""

import pytest
import torch

from foundry_fp8.kernels.delayed import update_delayed_
from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.numerics.recipes import DelayedScaling
from tests.kernels.cases import assert_same_bits


@pytest.mark.parametrize("length", [1, 2, 5, 64, 66, 200])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_matches_the_state(length, algorithm, device):
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm, margin=1)
    state = DelayedScalingState(recipe, [448.0, 57344.0] * 20)
    state.to(torch.device(device))
    scale, history = state.scale.clone(), state.amax_history.clone()
    for step in range(7):
        amax = torch.rand(40, device=device) * 10.0 ** (step - 3)
        amax[3] = 0.0  # never seen
        amax[5] = 0.0 if step % 2 else 1.0  # seen now and then
        amax[7] = float("inf") if step == 2 else 1.0
        amax[9] = 1e-42  # the quotient overflows
        state.amax_history[0] = history[0] = amax
        update_delayed_(scale, history, state.scaled_max, use_max=algorithm == "max")
        state.update()
        assert_same_bits(scale, state.scale, f"scale of step {step}")
        assert_same_bits(history, state.amax_history, f"history of step {step}")
    before = scale.clone()
    update_delayed_(scale, history, state.scaled_max, use_max=algorithm == "max")
    assert_same_bits(scale, before, "scale after a pass that saw nothing")
