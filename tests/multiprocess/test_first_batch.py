"""The trace of the first forward sees the same under every wrapper: gathered parameters are tensors of their own there."""

import pytest

from tests.multiprocess import launch
from tests.multiprocess.first_batch import what_ran

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.full) for kind in ("none", "ddp")), "fsdp1", "fsdp2"]
)
def test_what_ran_is_seen_through_the_wrapper(kind):
    results = launch.call(what_ran, 2, kind)
    for rows, warnings in results:
        for block in "01":
            assert rows[f"{block}.up"] == ("converted", "fp8")
            assert rows[f"{block}.down"] == ("skipped", "fp32")
            assert rows[f"{block}.experts"] == ("skipped", "fp32")
            assert rows[f"{block}.shift"][0] == "unused"
        assert len(warnings) == 2 and all("multiplies by its weight itself" in text for text in warnings)
