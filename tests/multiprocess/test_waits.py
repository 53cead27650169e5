"""A rank that fails inside a wait of this package: the others learn of it in seconds, by an error that names rank, part and step."""

import re

import pytest

from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess


def ended(*arguments, world=2):
    """Exit codes, outputs and the seconds after which each rank raised."""
    codes, outputs = launch.run("run_waits.py", world, *arguments, check=False, timeout=120)
    found = [re.search(r"RAISED after ([0-9.]+) s: (.*)", output) for output in outputs]
    return codes, outputs, [(float(f[1]), f[2]) if f else None for f in found]


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("case", ["oom", "error"])
def test_a_rank_that_fails_alone_in_a_sharded_measurement_ends_all_by_name(case, part):
    codes, outputs, raised = ended(case, 1, part)
    assert codes == [3, 3], outputs
    for seconds, said in raised:
        assert seconds < 25, outputs
        assert "callbacks.divergence_guard), batch 140" in said, said
        assert f"rank 1 failed with {'OutOfMemoryError' if case == 'oom' else 'ValueError'}" in said, said


@pytest.mark.parametrize("case", ["oom", "cublas"])
def test_out_of_memory_on_all_ranks_alike_is_handled_as_before(case):
    codes, outputs, _ = ended(case, "all", "forward")
    assert codes == [0, 0] and all("WENT ON with 1 rows" in output for output in outputs), outputs


@pytest.mark.parametrize("case", ["oom", "cublas"])
def test_under_ddp_one_rank_without_memory_is_handled_too(case):
    codes, outputs, _ = ended(case, 1, "forward", "ddp")
    assert codes == [0, 0] and all("WENT ON with 1 rows" in output for output in outputs), outputs


@pytest.mark.parametrize("part", ["forward", "backward", "adapt", "replicas"])
def test_a_rank_that_is_killed_is_named(part):
    codes, outputs, raised = ended("killed", 1, part)
    assert codes == [3, -9], outputs
    said = {"adapt": "adapt, batch 35", "replicas": "check_replicas"}.get(
        part, "divergence_guard), batch 140"
    )
    assert said in raised[0][1] and "ranks [1]" in raised[0][1], raised


def test_a_compressed_collective_under_fsdp2_raises_what_happened():
    """And not torch's own error of a group that it does not know."""
    codes, outputs, raised = ended("killed", 1, "compressed")
    assert codes == [3, -9] and "Invariant" not in raised[0][1] and "Connection" in raised[0][1], outputs


@pytest.mark.parametrize("part", ["adapt", "replicas"])
def test_a_rank_that_stalls_is_named_after_the_limit(part):
    codes, outputs, raised = ended("stall", 1, part)
    assert codes[0] == 3 and "ranks [1] did not come within 4 s" in raised[0][1], outputs
