"""Native FP8 attention on two ranks."""

import pytest
import torch

from tests.multiprocess import launch, native_attention

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.full,
]  # its twins on one rank: tests/backends/native/test_attention.py


def test_fsdp2_and_checkpointing_train_as_one_process_does(monkeypatch):
    """The rows of both ranks in one batch have the amaxes of both, and so the scales: gradients differ by the order of sums."""
    native_attention.interpret(monkeypatch)
    expected, scale = native_attention.alone()
    for found, scale_of_rank, of_an_average in launch.call(
        native_attention.sharded, 2, imports=f"{launch.FSDP},tests.multiprocess.native_attention"
    ):
        assert torch.equal(scale_of_rank, scale)
        for ours, theirs in zip(found, expected, strict=True):
            # The loss is a sum over rows, and FSDP2 takes the mean of two ranks.
            ours = ours * (2 / of_an_average)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
