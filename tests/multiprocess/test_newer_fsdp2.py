"""Averages and compression hold beside what FSDP2 learnt after torch 2.11."""

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.multiprocess import launch
from tests.multiprocess.newer_fsdp2 import separate_group, two_meshes

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not hasattr(FSDPModule, "set_separate_reduce_scatter_group"),
        reason="this torch's FSDP2 has none of it",
    ),
]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(("case", "units"), [(separate_group, 2), (two_meshes, 2)])
def test_gradients_are_the_mean_over_ranks_and_every_message_is_counted(case, units, compress):
    for error, sent, found in launch.call(case, 2, compress):
        assert found == units and sent > 0
        # int8 in blocks of 128: half a step of 1/127 of a block's largest value, which is about three of its root mean square.
        assert error < (0.02 if compress else 1e-5)
        assert (error > 0) == compress or error < 1e-5
