import pytest

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compression.routing import path_of
from foundry_fp8.distributed.mesh import smallest_shard


@pytest.mark.parametrize(("state", "wanted"), [(10, 1), (11, 2), (79, 8), (81, 16), (320, 32)])
def test_the_smallest_shard_that_fits_is_chosen(state, wanted):
    assert smallest_shard(state, 10, world=32, per_node=8) == wanted


def test_shard_groups_above_a_node_are_whole_nodes():
    assert smallest_shard(95, 10, world=24, per_node=8) == 24  # 12 ranks would fit but end inside a node


def test_a_model_that_fits_nowhere_is_an_error():
    with pytest.raises(ConfigError, match="does not fit 8 devices"):
        smallest_shard(100, 10, world=8, per_node=8)


def test_groups_that_span_nodes_are_distinguished_from_those_that_do_not():
    inside, across = (path_of(r, world=16, per_node=8, scope="auto") for r in ([0, 1, 7], [0, 8]))
    assert inside.why_not == "all its ranks are on one node" and across.why_not is None
