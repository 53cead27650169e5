"""The covering array covers, and its rows are ones that can run. Checked without the library that made it."""

import dataclasses
import itertools

import pytest

from tests.combinations.space import (
    DEFAULT,
    EXCLUDED,
    FACTORS,
    Case,
    allowed,
    beside_frozen_weights,
    covering,
)


@pytest.mark.parametrize("strength", [2, pytest.param(3, marks=pytest.mark.full)])
def test_every_allowed_combination_occurs_and_no_other(strength):
    rows = [dataclasses.asdict(case) for case in covering(strength)]
    assert all(allowed(row) for row in rows)
    for names in itertools.combinations(FACTORS, strength):
        seen = {tuple(row[name] for name in names) for row in rows}
        missing = set(itertools.product(*(FACTORS[name] for name in names))) - seen
        for values in missing:
            assert not reachable(dict(zip(names, values, strict=True))), (names, values)


def reachable(given):
    """Whether some row has these values: only the factors that a rule names can be in the way."""
    others = sorted({n for names, _ in EXCLUDED.values() for n in names} - given.keys())
    return any(
        allowed(given | dict(zip(others, values, strict=True)))
        for values in itertools.product(*(FACTORS[n] for n in others))
    )


def test_factors_and_the_case_are_the_same():
    assert [f.name for f in dataclasses.fields(Case)] == [*FACTORS, "frozen_weights"]
    assert all(getattr(DEFAULT, name) in values for name, values in FACTORS.items())


def test_everything_that_may_stand_beside_frozen_weights_does():
    cases = beside_frozen_weights()
    for case in cases:
        row = dataclasses.asdict(case)
        assert row.pop("frozen_weights") and (case.lora or case.frozen)
        assert allowed(row) and case.wrapper in ("none", "ddp")
    seen = {name: {getattr(case, name) for case in cases} for name in FACTORS}
    apart = {"wrapper", "fp8", "attention", "parameters", "init"}  # FSDP and recipes that it refuses
    assert all(seen[name] == set(values) for name, values in FACTORS.items() if name not in apart)
    assert seen["attention"] == {False, "delayed"} and seen["wrapper"] == {"none", "ddp"}
    assert seen["fp8"] == {"block", "mxfp8", "native-block"}
