"""Delayed scaling over two ranks: how often they talk, and that they quantise alike."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from foundry_fp8.layers.state import FP8State
from foundry_fp8.surgery.apply import apply_fp8
from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess


def three_microbatches():
    """The shape of every tensor that was reduced, the scales, and the amax of each rank's input."""
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    apply_fp8(model, recipe="delayed")
    ddp = nn.parallel.DistributedDataParallel(model)
    all_reduce, seen = dist.all_reduce, []

    def noted(tensor, *args, **options):
        seen.append(tuple(tensor.shape))
        return all_reduce(tensor, *args, **options)

    dist.all_reduce = noted
    x = torch.randn(16, 32) * (1 + 3 * dist.get_rank())
    for _ in range(3):
        ddp(x).square().mean().backward()
    state = FP8State.of(model)
    state.update()  # as the algorithm does when the batch ends
    scales = state.delayed.scale.tolist()
    dist.barrier()  # and no destroy_process_group: ranks.py says why
    return seen, scales, float(x.abs().max())


def test_one_all_reduce_of_all_amaxes_a_forward_and_one_when_the_batch_ends():
    (seen, scales, amax), (seen_, scales_, amax_) = launch.call(three_microbatches, 2)
    assert seen == seen_ == [(6,)] * 4
    assert scales == scales_ and scales[0] == pytest.approx(448 / max(amax, amax_))
