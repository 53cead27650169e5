"""A rank fails somewhere in a step: the others know within seconds, by an error that names what they waited for.

One table: what happens, where, under which wrapper, on how many ranks. A few cells run by default, all of them with ``-m full``.
"""

import itertools
import re

import pytest

from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess

LIMIT, WITHIN, BUSY = 4, 5, 3
"""Seconds: what ranks wait in the worker, what they may take beyond it to know, and what a busy machine may add."""
CASES = ("oom", "error", "stall", "killed")
PLACES = (
    "forward",
    "backward",
    "measured_forward",
    "measured_backward",
    "adapt",
    "replicas",
    "checkpoint",
    "agree",
)
WRAPPERS = {2: ("ddp", "fsdp1", "fsdp2"), 4: ("ddp", "fsdp1", "fsdp2", "hsdp1", "hsdp2")}
DEFAULT = {
    ("killed", "backward", "fsdp2", 2),
    ("error", "measured_forward", "ddp", 2),
    ("stall", "measured_backward", "fsdp1", 2),
    ("killed", "measured_backward", "hsdp2", 4),
    ("oom", "measured_backward", "ddp", 2),
    ("stall", "adapt", "fsdp2", 4),
    ("killed", "replicas", "ddp", 2),
    ("error", "agree", "ddp", 2),
}
QUICK = (("fsdp1", 2, "measured_backward"), ("fsdp2", 2, "measured_forward"))
NAMED = {
    "measured_forward": r"divergence_guard\), batch 140.*rank(s \[.*1.*\]| 1 failed)",
    "measured_backward": r"divergence_guard\), batch 140.*rank(s \[.*1.*\]| 1 failed)",
    "adapt": r"adapt, batch 35, rank \d: ranks \[1\]",
    "replicas": r"hybrid_sharding.check_replicas, rank \d: ranks \[1\]",
    "checkpoint": r"delayed scaling: ranks \[[^\]]*[01]",  # rank 0 where it left before, and the store with it
    "agree": r"ranks \[1\] did not set it up within 4 s",
}


def possible(case, place, wrapper, world):
    """Not what training waits for in a group of the mesh, whose limit is torch's default, nor what is attached already."""
    if place == "agree":
        return wrapper != "hsdp2"
    training = place in ("forward", "backward") or (place == "checkpoint" and wrapper == "hsdp1")
    return not (case == "stall" and wrapper.startswith("hsdp") and training)


def cells():
    for world, wrappers in WRAPPERS.items():
        for cell in itertools.product(CASES, PLACES, wrappers, [world]):
            if possible(*cell):
                yield pytest.param(
                    *cell, marks=[] if cell in DEFAULT else pytest.mark.full, id="-".join(map(str, cell))
                )


def run(case, place, wrapper, world, who=1, beside=""):
    return launch.run(
        "run_failing_rank.py", world, case, place, wrapper, who, beside, check=False, timeout=120
    )


@pytest.mark.parametrize("case, place, wrapper, world", list(cells()))
def test_others_know_in_time_and_by_name(case, place, wrapper, world):
    codes, outputs = run(case, place, wrapper, world)
    failed = float(re.search(r"FAILS at ([0-9.]+)", outputs[1])[1])
    if wrapper == "ddp" and place.startswith("measured") and case == "oom":
        assert codes == [0] * world and all("WENT ON with 1 rows" in output for output in outputs), outputs
        return
    for rank in set(range(world)) - {1}:
        assert codes[rank] == 3, outputs
        seconds, said = re.search(r"KNOWS at ([0-9.]+): (.*)", outputs[rank]).groups()
        waited = LIMIT if case == "stall" or place == "agree" else 0
        assert float(seconds) - failed < waited + WITHIN + BUSY, outputs
        assert re.search(NAMED.get(place, "Connection|Read error|Timed out"), said), said
        assert "Invariant" not in said, said  # torch's own error of a group that it does not know


@pytest.mark.parametrize(
    "wrapper, world, place",
    [
        pytest.param(
            wrapper,
            world,
            place,
            marks=[] if (wrapper, world, place) in QUICK else pytest.mark.full,
            id=f"{wrapper}-{world}-{place}",
        )
        for wrapper, world in (("fsdp1", 2), ("fsdp2", 2), *((wrapper, 4) for wrapper in WRAPPERS[4]))
        for place in ("measured_forward", "measured_backward")
    ],
)
def test_a_measurement_that_all_ranks_end_without_memory_leaves_nothing_in_the_next_step(
    place, wrapper, world
):
    assert_nothing_is_left(place, wrapper, world)


@pytest.mark.parametrize(
    "beside",
    [
        "lora",
        *(
            pytest.param(other, marks=pytest.mark.full)
            for other in ("autocast", "compile", "accumulation", "recompute")
        ),
    ],
)
@pytest.mark.parametrize("wrapper", ["fsdp1", pytest.param("fsdp2", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "place", ["measured_backward", pytest.param("measured_forward", marks=pytest.mark.full)]
)
def test_nor_beside_what_else_a_training_has(place, wrapper, beside):
    assert_nothing_is_left(place, wrapper, 2, beside)


def assert_nothing_is_left(place, wrapper, world, beside=""):
    """Parameters are those after a measurement that ended well, to the bit."""
    found = []
    for case in ("nothing", "oom"):
        codes, outputs = run(case, place, wrapper, world, "all", beside)
        assert codes == [0] * world, outputs
        found.append([re.search(r"WENT ON with (\d) rows, (.*)", output).groups() for output in outputs])
    well, without = (list(zip(*ranks, strict=True)) for ranks in found)
    assert set(well[0]) == {"2"} and set(without[0]) == {"1"}
    assert well[1] == without[1]


def test_memory_that_cublas_lacks_is_memory():
    codes, outputs = run("cublas", "measured_forward", "ddp", 2)
    assert codes == [0, 0] and all("WENT ON with 1 rows" in output for output in outputs), outputs


@pytest.mark.full
@pytest.mark.parametrize("case", ["oom", "stall", "killed"])
def test_the_rank_that_holds_the_store_is_named_too(case):
    _, outputs = run(case, "measured_backward", "fsdp2", 2, 0)
    said = re.search(r"KNOWS at [0-9.]+: (.*)", outputs[1])[1]
    assert re.search(r"batch 140, rank 1: .*rank(s \[0\]| 0 failed)", said), said
