"""The block grammar against LLM Foundry's own function, on generated specs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmfoundry.models.utils.act_ckpt import check_mapping_blocks_overlap, get_target_block_list

from foundry_fp8.activations.checkpointing.targets import check_overlap
from foundry_fp8.config import ConfigError
from foundry_fp8.model_structure.block_numbers import format_blocks, parse_blocks


def numbers(rng: random.Random) -> str:
    return rng.choice(
        ["0", "1", "2", "3", "5", "7", "12", "40", "007", "", "-1", "x", "1.5", "²", " 2", "+3", "1_0"]
    )


def element(rng: random.Random) -> str:
    kind = rng.choice(["first", "middle", "last", "range", "range", "First", "frist", ""])
    if kind == "range":
        return "range-" + "-".join(numbers(rng) for _ in range(rng.choice([1, 2, 2, 2, 2, 3])))
    return f"{kind}-{numbers(rng)}" if rng.random() < 0.95 else kind


def spec(rng: random.Random) -> object:
    shape = rng.random()
    if shape < 0.15:
        return rng.choice([0, 1, 3, 12, 100, -1, True, False, None, 2.5, (1, 2), {}])
    if shape < 0.55:
        return rng.choice([",", ", ", " , "]).join(element(rng) for _ in range(rng.randint(1, 3)))
    return [
        rng.choice([element(rng), rng.randint(-2, 14), rng.randint(0, 9)]) for _ in range(rng.randint(0, 4))
    ] + ([rng.choice([None, 1.5, [1]])] if rng.random() < 0.1 else [])


def is_nonsense(spec: object) -> bool:
    """True for a number, numbers below zero, ranges that run backwards, and an empty list."""
    if isinstance(spec, str):
        ranges = [
            element.split("-")[1:] for element in spec.split(",") if element.strip().startswith("range-")
        ]
        return any(len(ends) == 2 and int(ends[0]) > int(ends[1]) for ends in ranges)
    if isinstance(spec, list):
        return not spec or any(is_nonsense(element) for element in spec)
    return isinstance(spec, bool) or (isinstance(spec, int) and spec < 0)


def outcome(function, spec, n):
    try:
        return {block for block in function(spec, n) if 0 <= block < n}
    except (AssertionError, ValueError, TypeError, AttributeError):
        return "error"


def test_600_generated_specs_mean_what_they_mean_to_foundry():
    rng = random.Random(4)
    valid = invalid = refused = 0
    for _ in range(600):
        s, n = spec(rng), rng.choice([1, 2, 5, 6, 12])
        theirs = outcome(lambda s, n: get_target_block_list(s, n - 1), s, n)
        ours = outcome(lambda s, n: parse_blocks(s, n, "targets"), s, n)
        if ours == "error" != theirs and is_nonsense(s):  # Foundry reads a number or nothing into it
            refused += 1
            continue
        assert ours == theirs, (s, n)
        valid, invalid = valid + (theirs != "error"), invalid + (theirs == "error")
    assert min(valid, invalid) > 150 and refused > 20  # the generator covers all


def test_600_generated_mappings_overlap_as_in_foundry():
    rng = random.Random(5)
    errors = 0
    for _ in range(600):
        n = rng.choice([3, 6, 12])
        mapping = {
            name: rng.sample(range(n), rng.randint(0, max(1, n // 3))) if rng.random() < 0.9 else -1
            for name in rng.sample(["a", "b", "c", "d"], rng.randint(1, 3))
        }

        def theirs(mapping=mapping, n=n):
            check_mapping_blocks_overlap(mapping, n - 1)

        def ours(mapping=mapping, n=n):
            every = frozenset(range(n))
            check_overlap([(k, every if v == -1 else frozenset(v)) for k, v in mapping.items()], "targets")

        try:
            theirs()
        except ValueError:
            errors += 1
            with pytest.raises(ConfigError, match="belongs to both"):
                ours()
        else:
            ours()
    assert 100 < errors < 500


def test_every_k_counts_from_block_0():
    assert parse_blocks("every-3", 8, "targets") == {0, 3, 6}
    assert parse_blocks("every-1, first-1", 3, "targets") == {0, 1, 2}
    with pytest.raises(ConfigError, match=r"targets\.x: 'every-0'"):
        parse_blocks("every-0", 8, "targets.x")


def test_a_share_of_the_blocks_is_rounded_up():
    assert parse_blocks("last-15%", 24, "targets") == {20, 21, 22, 23}
    assert parse_blocks("first-25%, middle-25%", 8, "targets") == {0, 1, 2, 3}
    assert parse_blocks("last-1%", 3, "targets") == {2} and parse_blocks("first-0%", 3, "targets") == set()
    for wrong in ("last-101%", "last-1.5%", "last-%", "range-1%-2", "every-5%", "last-²%"):
        with pytest.raises(ConfigError, match="does not name blocks"):
            parse_blocks(wrong, 8, "targets")


@pytest.mark.parametrize(
    "spec", [2**40, [2**40, 0, 1, 2], f"first-{2**40}", f"range-0-{2**40}", f"middle-{2**40}"]
)
def test_a_number_far_past_the_last_block_costs_no_time(spec):
    """Hours, when every number up to it was looked at: the fuzzer of all options found it by never ending."""
    assert parse_blocks(spec, 3, "targets") == {0, 1, 2}


@given(st.sets(st.integers(0, 40)))
@settings(max_examples=50, deadline=None)
def test_formatted_blocks_parse_back(blocks):
    if blocks:
        assert parse_blocks(format_blocks(blocks), 41, "targets") == blocks
