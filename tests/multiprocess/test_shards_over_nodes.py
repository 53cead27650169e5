"""Two hops in shard groups that span nodes: whole nodes, or equal parts of them."""

import pytest

from tests.multiprocess import launch
from tests.multiprocess.shards_over_nodes import trained

pytestmark = [pytest.mark.multiprocess, pytest.mark.full]


@pytest.mark.parametrize(("wire", "bound"), [("bf16", 4e-3), ("int8", 0.02)])
def test_two_copies_of_two_nodes_each(wire, bound):
    """Copies of 4 ranks on nodes of 2, among 8 ranks. Bounds: twice one rounding of the format (bf16 8 bits; int8 in blocks of 128)."""
    for error, rows in launch.call(trained, 8, 4, {"gradients": wire, "inside_node": "exact"}, per_node=2):
        assert 0 < error < bound, (error, rows)
        assert any("reduce-scatter" in row["reason"] and row["action"] == wire for row in rows), rows
