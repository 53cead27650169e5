"""An agreement of all ranks does not ask for every pair of them."""

import pytest

from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess


def test_requests_grow_with_the_ranks_and_not_with_their_square():
    """Rank 0 reads one answer more for each rank more, and the other ranks send as much among six as among two."""
    from tests.multiprocess.counted_requests import requests

    few, many = (launch.call(requests, world) for world in (2, 6))
    assert 0 < len(few[1]) <= 4
    assert {tuple(sent) for sent in many[1:]} == {tuple(few[1])}
    assert len(many[0]) - len(few[0]) <= 6 - 2
