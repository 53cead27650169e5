"""The search: what it finds is sufficient, nothing in it is superfluous, and it asks few questions."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from foundry_fp8.observe.guard.guard import smallest_sufficient


@given(st.integers(1, 60), st.data())
def test_what_it_finds_is_what_is_at_fault(count, data):
    names = [str(i) for i in range(count)]
    faults = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    asked = []

    def sufficient(part):
        asked.append(list(part))
        return faults <= set(part)

    assert smallest_sufficient(names, sufficient, questions=10_000) == [n for n in names if n in faults]
    few = max(len(faults), 1)
    assert len(asked) <= 2 * few * math.log2(count / few) + 2 * few + 2 * few
    assert len({*map(frozenset, asked)}) == len(asked)  # nothing twice


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0.05, 0.9))
def test_of_many_that_add_up_it_finds_a_part_of_which_all_is_needed(errors, limit):
    """The error that is left is that of those that stay."""
    names = [str(i) for i in range(len(errors))]
    total = sum(errors)

    def sufficient(part):
        return sum(e for n, e in zip(names, errors, strict=True) if n not in part) <= limit * total

    found = smallest_sufficient(names, sufficient)
    assert sufficient(found)
    assert all(not sufficient([n for n in found if n != name]) for name in found)


def test_after_so_many_questions_what_is_left_stays_whole():
    names = [str(i) for i in range(64)]
    asked = []

    def sufficient(part):
        asked.append(part)
        return {"3", "40"} <= set(part)

    found = smallest_sufficient(names, sufficient, questions=5)
    assert {"3", "40"} <= set(found) and len(found) < 64 and len(asked) <= 12
    assert smallest_sufficient([], sufficient) == []
