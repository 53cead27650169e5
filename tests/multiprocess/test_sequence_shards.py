"""Sequence shards gathered as FP8 codes: outputs, gradients and delayed scaling's histories are those of torch's gather, to the bit."""

import re

import pytest

from tests.multiprocess import launch
from tests.multiprocess.sequence_shards import (
    BATCH,
    STEPS,
    TOKENS,
    WIDTH,
    refused,
    step_by_step,
    uneven,
    with_and_without,
    with_composer,
)

pytestmark = pytest.mark.multiprocess
POWERS = {"name": "current", "power_2_scales": True}
full = pytest.mark.full
GATHERS = 2 * 2  # blocks, gate and up
SHARD = BATCH * TOKENS * WIDTH  # elements
AMAX = 4  # bytes


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("current", {}),
        ("delayed", {"recompute": True, "parts": 2}),
        pytest.param(POWERS, {"dim": 0}, marks=full),
        pytest.param("current", {"dtype": "float32", "autocast": True, "recompute": True}, marks=full),
        pytest.param("current", {"dtype": "float16", "parts": 2}, marks=full),
        pytest.param("current", {"kinds": ["inf", "nan", "random"]}, marks=full),
        pytest.param("delayed", {"kinds": ["random", "inf", "nan", "outliers", "random"]}, marks=full),
        pytest.param("delayed", {"part_of_the_model": True}, marks=full),
        pytest.param("delayed", {"dtype": "float32", "dim": 0}, marks=full),
        pytest.param(
            {"name": "delayed", "margin": 2, "amax_history_len": 1}, {"dtype": "float16"}, marks=full
        ),
    ],
    ids=str,
)
def test_codes_and_torchs_gather_give_the_same_bits(recipe, options):
    forwards = GATHERS * len(options.get("kinds", STEPS)) * options.get("parts", 1)
    forwards *= 2 if options.get("recompute") else 1
    size = 4 if options.get("dtype") == "float32" else 2
    for differs, sent, wire, logical, summary in launch.call(with_and_without, 2, recipe, options):
        assert not differs
        assert sent["all_gather"] == forwards * (SHARD + AMAX)
        assert sent.get("all_reduce", 0) == (0 if "delayed" in str(recipe) else forwards * AMAX)
        assert logical == forwards * SHARD * size
        assert wire <= 0.51 * forwards * SHARD * 2  # of bfloat16, whatever the dtype
        assert summary == f"compressed_communication: {GATHERS} x activations as fp8: while it has one scale"


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_beside_fsdp2_on_the_other_dimension(recipe):
    for differs, sent, *_ in launch.call(with_and_without, 4, recipe, {}):
        assert not differs
        assert sent["all_gather"] == GATHERS * len(STEPS) * (SHARD + AMAX)


def test_each_call_says_what_travels():
    one = SHARD + AMAX + AMAX  # the codes, with an amax, after the amaxes' all-reduce
    for found in launch.call(step_by_step, 2, None):
        assert [same for _, same in found] == [True] * len(found)
        assert [sent / one for sent, _ in found] == [4, 3, 2, 4, 3, 2, 4, 0, 4]


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_shards_of_different_lengths(recipe):
    assert launch.call(uneven, 2, recipe) == [[], []]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no plan", "ConfigError: algorithms.compressed_communication.activations: fp8, but no FP8 linear with recipe"),
        pytest.param("not converted", "activations: fp8, but no FP8 linear with recipe", marks=full),
        pytest.param("blocks", "activations: fp8, but no FP8 linear with recipe", marks=full),
        pytest.param("a parent gathers", r"what PrepareModuleInput gathers stays", marks=full),
        pytest.param("wrapper", "wrapped by neither DDP nor FSDP.*or set gradients: none for activations", marks=full),
    ],
)  # fmt: skip
def test_what_would_have_no_effect_is_an_error(what, said):
    for found in launch.call(refused, 2, what):
        assert found is not None and re.search(said, found)


@pytest.mark.integration
@pytest.mark.full
def test_under_composer_and_its_plan():
    """FSDP1 over the other dimension, as Composer has it; all of a batch is a shard here."""
    pytest.importorskip("composer")
    for plain, coded, wire in launch.call(with_composer, 4, imports=launch.COMPOSER):
        assert coded == plain and coded[-1] < coded[0]
        assert wire == [32 * 32 + AMAX] * 4
