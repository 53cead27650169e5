"""Counted bytes beside the allocator's own record."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import foundry_fp8
from foundry_fp8.planning.memory.live_bytes import LiveBytes
from tests.allocations import most_allocated
from tests.export.published import publish
from tests.export.test_lora_memory import base

SMALL = 4096
"""Bytes that operators take and give back inside themselves."""


def counted(step):
    with LiveBytes() as meter:
        step()
    return meter.peak


@pytest.mark.parametrize("e8m0", [False, True, None], ids=["float", "ue8m0", "plain"])
def test_a_step_over_weights_kept_in_fp8_holds_what_was_allocated(e8m0, tmp_path):
    """Their values in high precision are made in a wrapper's own dispatch, and are most of what this step holds."""
    model = base(torch.float32).requires_grad_(False)
    if e8m0 is not None:
        publish(base(torch.float32), tmp_path, e8m0=e8m0)
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


def test_local_tensors_of_a_dtensor_are_counted(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, w = (distribute_tensor(torch.randn(256, 256), mesh) for _ in range(2))
        layer = nn.Sequential(nn.GELU(), nn.SiLU())

        def step():
            return layer(x @ w).sum()

        assert counted(step) == counted(step)  # the first time DTensor runs operators on fakes too
        assert counted(step) == pytest.approx(most_allocated(step), abs=SMALL)
    finally:
        dist.destroy_process_group()
