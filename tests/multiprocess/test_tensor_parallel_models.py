"""Llama, Qwen3, MPT and FOG under torch's tensor parallelism in every recipe: against float64, and against the same model on one rank."""

import itertools

import pytest
import torch

from tests.multiprocess import launch
from tests.multiprocess.tensor_parallel_models import alike

pytestmark = pytest.mark.multiprocess
ROW = {"name": "current", "granularity": "row"}
RECIPES = ("current", ROW, "delayed", "block", "mxfp8", "nvfp4")
QUICK = (("qwen3", "nvfp4", 1), ("fog", "delayed", 1))
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
    for case in itertools.product(("llama", "qwen3", "fog", "mpt"), RECIPES, (1, 2))
]
WIDER, WIDER_ON_AVERAGE = 1.10, 1.02  # than the error on one rank; over many seeds the mean is 1


@pytest.mark.parametrize(("name", "recipe", "data"), CASES, ids=str)
def test_a_model_is_as_exact_in_shards_as_whole(name, recipe, data):
    """``data``: times how many ranks FSDP2 shards over; each has a part of the batch."""
    if name == "mpt":
        pytest.importorskip("llmfoundry")
    imports = f"{launch.FSDP},transformers" + (",llmfoundry" if name == "mpt" else "")
    found = launch.call(alike, 2 * data, name, recipe, data, imports=imports)
    one, shards, (whole, parts), _ = found[0]
    # xIELU's two scalars have an error of a single draw.
    compared = [n for n in one if not n.endswith((".act.p", ".act.n"))]
    ratios = {n: shards[n] / one[n] for n in compared}
    assert max(ratios.values()) <= WIDER, ratios
    assert sum(shards[n] for n in compared) <= WIDER_ON_AVERAGE * sum(one[n] for n in compared), ratios
    assert all(replicas for *_, replicas in found)
    if data == 1 and recipe in ("delayed", "block", "mxfp8"):
        # One scale a tensor of the whole, or blocks that end where shards do: the bits of one rank, but for sums.
        assert all(shards[n] == pytest.approx(one[n], rel=0.02) for n in one), ratios
    if data == 1 and recipe == "delayed":
        assert whole and all(torch.allclose(parts[n], whole[n], rtol=0.02) for n in whole)
