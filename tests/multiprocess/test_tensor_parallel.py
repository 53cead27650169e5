"""FP8 layers whose weights torch's tensor parallelism shards: against float64, and against the same model on one rank."""

import pytest
import torch

from tests.multiprocess import launch
from tests.multiprocess.tensor_parallel import alike, measured, with_composer, with_fsdp2

pytestmark = pytest.mark.multiprocess
ROW = {"name": "current", "granularity": "row"}
WIDER = 1.10  # of the error on one rank; the mean over seeds is at most 1


def scales(state):
    return {name: entry["scale"] for name, entry in state["modules"].items()}


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("current", {"sequence": True, "bias": True}),
        pytest.param("delayed", {"sequence": True}, marks=pytest.mark.full),
        ("delayed", {"bias": True, "parts": 2}),
        ("block", {"recompute": True, "parts": 2}),
        pytest.param("current", {}, marks=pytest.mark.full),
        pytest.param(ROW, {}, marks=pytest.mark.full),
        pytest.param("mxfp8", {"bias": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_shards_are_as_exact_as_the_whole(recipe, options):
    """What has one scale a tensor of the whole (delayed), or blocks that end where shards do, gives the bits of one rank but for sums."""
    found = launch.call(alike, 2, recipe, options)
    whole, shards, same, states, flops, _ = found[0]
    compared = [name for name in whole if not name.endswith("k.bias")]  # whose gradient is 0
    assert all(shards[name] <= WIDER * whole[name] for name in compared), (whole, shards)
    assert sum(shards[n] for n in compared) <= 1.02 * sum(whole[n] for n in compared)
    if recipe in ("delayed", "block", "mxfp8"):
        assert all(shards[name] == pytest.approx(whole[name], rel=1e-4) for name in compared)
        assert sum(same.values()) > len(same) // 2
    if recipe == "delayed":
        one, several = (scales(state) for state in states)
        assert all(torch.equal(one[name], several[name]) for name in one)
    assert flops[1] * 2 == flops[0]
    assert all(replicas for *_, replicas in found)


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.full)])
def test_beside_fsdp2_on_the_other_dimension(recipe):
    for whole, shards, states, names in launch.call(with_fsdp2, 4, recipe):
        assert all(shards[name] <= WIDER * whole[name] for name in whole)
        assert "blocks.0.q.weight" in names and not any("scale" in name for name in names)
        if recipe == "delayed":
            one, several = (scales(state) for state in states)
            assert all(torch.equal(one[name], several[name]) for name in one)


def test_the_guard_measures_shards_as_it_measures_the_whole():
    found = launch.call(measured, 2, "current")
    assert found[0] == found[1]
    one, shards, gradient = found[0]
    assert one.keys() == shards.keys() and gradient > 0
    assert all(0.5 * one[name] < shards[name] < 1.5 * one[name] for name in one), (one, shards)


@pytest.mark.integration
def test_under_composer_and_its_plan():
    """FSDP1 over the other dimension, as Composer has it; a layer outside of the plan runs in FP8 too."""
    pytest.importorskip("composer")
    for converted, losses, unsharded in launch.call(with_composer, 4, imports=launch.COMPOSER):
        assert converted == ["up", "down", "last"]
        assert losses == pytest.approx(unsharded, rel=2e-2) and losses[-1] < losses[0]
