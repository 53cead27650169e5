"""Delayed scaling against a line-by-line transcription of TE's bulk kernel in plain Python."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.numerics.quantize import FLOAT32_MAX
from foundry_fp8.numerics.recipes import DelayedScaling


class KernelBulk:
    """One tensor, as delayed_scaling.cu does it (float32 throughout)."""

    def __init__(self, length, fp8_max, margin, algo):
        self.history = [np.float32(0)] * length
        self.scale = np.float32(1)
        self.max = np.float32(fp8_max * 2.0**-margin)
        self.algo = algo

    def step(self, seen):
        self.history[0] = np.float32(max(self.history[0], np.float32(seen)))
        current, old, length = self.history[0], list(self.history), len(self.history)
        if current != 0 and length > 1:
            for i in range(1, length - 1):
                self.history[i] = old[i + 1]
            self.history[length - 1] = current
        amax = max([current, *old[1:]]) if self.algo == "max" else current
        self.history[0] = np.float32(0)
        if current == 0:
            amax = np.float32(0)
        if math.isfinite(amax) and amax > 0:
            with np.errstate(all="ignore"):
                scale = self.max / np.float32(amax)
            self.scale = np.float32(FLOAT32_MAX) if np.isinf(scale) else scale


amaxes = st.one_of(
    st.just(0.0),
    st.just(math.inf),
    st.floats(min_value=np.float32(1e-44), max_value=np.float32(3e38), width=32),
)


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(1, 5),
    margin=st.integers(0, 2),
    algo=st.sampled_from(["max", "most_recent"]),
    steps=st.lists(st.tuples(amaxes, amaxes), min_size=1, max_size=12),
)
def test_update_equals_the_bulk_kernel(length, margin, algo, steps):
    recipe = DelayedScaling(amax_history_len=length, margin=margin, amax_compute_algo=algo)
    state = DelayedScalingState(recipe, [448.0, 57344.0])
    kernels = [KernelBulk(length, 448.0, margin, algo), KernelBulk(length, 57344.0, margin, algo)]
    for step in steps:
        for i, amax in enumerate(step):
            state.slot(i).record(torch.tensor(amax))
            kernels[i].step(amax)
        state.update()
        for i, kernel in enumerate(kernels):
            assert state.scale[i].item() == kernel.scale
            assert state.amax_history[:, i].tolist() == kernel.history


def test_recording_twice_and_updating_twice_change_nothing():
    state = DelayedScalingState(DelayedScaling(amax_history_len=4), [448.0])
    state.slot(0).record(torch.tensor(2.0))
    state.slot(0).record(torch.tensor(2.0))
    state.update()
    scale, history = state.scale.clone(), state.amax_history.clone()
    state.update()
    assert torch.equal(state.scale, scale) and torch.equal(state.amax_history, history)
    assert scale.item() == 224.0


def test_nan_is_not_recorded_and_inf_freezes_the_scale_until_it_leaves_the_window():
    state = DelayedScalingState(DelayedScaling(amax_history_len=3), [448.0])
    slot = state.slot(0)
    scales = []
    for amax in (4.0, math.nan, math.inf, 8.0, 8.0, 8.0):
        slot.record(torch.tensor(amax))
        state.update()
        scales.append(state.scale.item())
    assert scales == [112.0, 112.0, 112.0, 112.0, 112.0, 56.0]


@pytest.mark.parametrize("margin, expected", [(0, 448.0), (3, 56.0)])
def test_margin_leaves_head_room(margin, expected):
    state = DelayedScalingState(DelayedScaling(margin=margin), [448.0])
    state.slot(0).record(torch.tensor(1.0))
    state.update()
    assert state.scale.item() == expected
