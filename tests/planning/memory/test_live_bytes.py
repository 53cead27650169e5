"""Counted bytes beside the allocator's own record."""

import pytest
import torch

import foundry_fp8
from foundry_fp8.planning.memory.live_bytes import LiveBytes
from tests.allocations import most_allocated
from tests.export.published import publish
from tests.export.test_lora_memory import base
from tests.multiprocess import launch
from tests.multiprocess.dtensor_bytes import counted_and_allocated

SMALL = 4096
"""Bytes that operators take and give back inside themselves."""


def counted(step):
    with LiveBytes() as meter:
        step()
    return meter.peak


@pytest.mark.parametrize(
    "e8m0", [False, pytest.param(True, marks=pytest.mark.full), None], ids=["float", "ue8m0", "plain"]
)
def test_a_step_over_weights_kept_in_fp8_holds_what_was_allocated(e8m0, tmp_path):
    """Their values in high precision are made in a wrapper's own dispatch, and are most of what this step holds."""
    model = base(torch.float32, layers=2).requires_grad_(False)
    if e8m0 is not None:
        publish(base(torch.float32, layers=2), tmp_path, e8m0=e8m0)
        foundry_fp8.load_fp8(tmp_path, model)
    ids = torch.randint(0, 256, (1, 8))
    x = model.get_input_embeddings()(ids).detach().requires_grad_()

    def step():
        model(inputs_embeds=x, labels=ids).loss.backward()
        x.grad = None

    step()
    most = most_allocated(step)
    assert counted(step) == pytest.approx(most, abs=SMALL)
    assert e8m0 is None or most > 4 * x.nbytes


@pytest.mark.multiprocess
def test_local_tensors_of_a_dtensor_are_counted():
    ((first, again, most),) = launch.call(counted_and_allocated, 1)
    assert first == again == pytest.approx(most, abs=SMALL)
