"""Replicas that differ end a run of the Trainer on every rank: at the attach, or after the first step."""

import pytest

from tests.multiprocess import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]


def test_a_bit_that_one_replica_changed_ends_the_run_on_both_ranks():
    from tests.multiprocess.drifting import drifts

    for found in launch.call(drifts, 2, imports=launch.COMPOSER):
        assert found.pop(("ddp", "never", True)) == (3, "")
        for wrapper, key in (("ddp", "compressed_communication"), ("fsdp2", "hybrid_sharding")):
            assert found.pop((wrapper, "trained", False)) == (3, "")
            batches, said = found.pop((wrapper, "trained", True))
            assert batches == 1, wrapper  # the first batch's end, and not a later one
            assert said.startswith(f"algorithms.{key}: ") and "inner.weight differ between" in said, said
        batches, said = found.pop(("fsdp2", "wrapped", True))
        assert batches == 0 and said.startswith("algorithms.hybrid_sharding: "), said
        assert "inner.weight differ between replicas" in said
        assert not found
