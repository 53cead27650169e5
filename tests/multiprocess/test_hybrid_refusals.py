"""What hybrid sharding cannot run is refused on every rank before the model is wrapped."""

import pytest

from tests.multiprocess import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]

SAID = {
    "no_fsdp": "needs FSDP",
    "tensor_parallel": "tensor parallelism are not supported together",
    "rank0_only": "load_monolith_rank0_only does not broadcast across replicas",
    "strategy": "FULL_SHARD or HYBRID_SHARD, not SHARD_GRAD_OP",
}


def test_what_it_cannot_run_is_refused_by_the_key():
    from tests.multiprocess.hybrid_refusals import refusals

    for found in launch.call(refusals, 2, imports=launch.COMPOSER):
        assert found.keys() == SAID.keys()
        for name, said in SAID.items():
            assert found[name].startswith("ConfigError: algorithms.hybrid_sharding") and said in found[name]
