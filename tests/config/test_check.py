"""The check itself: each kind of annotation, what it takes, what it refuses, and under which path."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pytest

from foundry_fp8.config import (
    Batches,
    Bytes,
    Config,
    ConfigError,
    Fraction,
    Names,
    Natural,
    Positive,
    PositiveNumber,
    Text,
    accept,
    check_arguments,
    from_mapping,
    not_empty,
    one_of,
    power_of_two,
    template,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner(Config):
    target: Text
    blocks: Natural = 0


TAKES = [
    (Positive, [(1, 1), (10**20, 10**20)]),
    (Fraction, [(0.5, 0.5), (1, 1)]),
    (bool, [(True, True)]),
    (Batches, [("5ba", 5), (7, 7), (0, 0)]),
    (Bytes, [("64kib", 65536), ("1.5 MB", 1_500_000), (12, 12)]),
    (Names, [([], ()), (["*.a", "b"], ("*.a", "b"))]),
    (Literal["auto"] | Positive, [("auto", "auto"), (2, 2)]),
    (Mapping[Text, Names], [({}, {}), ({"a": ["b"]}, {"a": ("b",)})]),
    (Sequence[Inner], [([{"target": "x"}], (Inner(target="x"),))]),
    (Annotated[int, power_of_two(32, 64)], [(32, 32), (64, 64)]),
    (Annotated[str, template("run_name")], [("a/{run_name}.b", "a/{run_name}.b")]),
    (Text | None, [(None, None), ("x", "x")]),
]
REFUSES = [
    (Positive, [0, -1, True, 1.0, "1", None, [], math.nan]),
    (PositiveNumber, [0, -0.5, math.nan, math.inf, True, "1.0", [1.0], {}]),
    (bool, [0, 1, "true", None, []]),
    (Batches, ["-5ba", "5ep", "1.5ba", "5", "ba", -1, True, None, 5.0, ["5ba"], "9" * 5000 + "ba"]),
    (Bytes, ["-1GiB", "1 furlong", "nan", -1, True, 1.0, "9" * 400, None]),
    (Names, ["*.a", ["a", ""], ["a", 1], [None], {"a": "b"}, ["a\0"]]),
    (Literal["auto"] | bool, [1, 0, 1.0, "aut", None]),
    (Literal["node", "auto"] | Positive, ["nod", 0, True, [1]]),
    (Mapping[Text, Literal["int8"]], [[], "x", {"a": "int9"}, {1: "int8"}, {"a": []}]),
    (Annotated[Mapping[Text, Any], not_empty], [{}]),
    (Sequence[Inner], [[{}], [{"target": "x", "blocks": -1}], [{"targt": "x"}], {"target": "x"}]),
    (Annotated[int, power_of_two(32, 64)], [0, 31, 48, 128, -32]),
    (Annotated[str, template("run_name")], ["{nope}", "{", "{}", "{run_name!x"]),
    (Annotated[str, one_of("a", "b")], ["c", ["a"], {}, None]),
]


@pytest.mark.parametrize(("hint", "cases"), TAKES, ids=lambda x: str(x)[:40])
def test_a_value_that_fits_comes_out_as_the_annotation_has_it(hint, cases):
    for given, expected in cases:
        found = accept(hint, given, "k")
        assert found == expected and type(found) is type(expected)
        assert accept(hint, found, "k") == expected, "what was accepted once is accepted again"


@pytest.mark.parametrize(("hint", "values"), REFUSES, ids=lambda x: str(x)[:40])
def test_a_value_that_does_not_fit_is_refused_under_its_path(hint, values):
    for value in values:
        with pytest.raises(ConfigError, match=r"^algorithms\.x\.y[.\[:]"):
            accept(hint, value, "algorithms.x.y")


@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        (Positive, 0, "k: 0 is not an integer of at least 1."),
        (Fraction, math.nan, "k: nan is not a number above 0 and at most 1."),
        (Literal["node", "auto"] | Positive, "nod", "k: 'nod' is not one of node, auto or an integer of at least 1. "
         "Did you mean 'node'?"),
        (Names, "*.a", 'k: \'*.a\' is not a list of strings, such as ["a", "b"].'),
        (Sequence[Inner], [{"targt": 1}], "k[0].targt: unknown key. k[0] takes target, blocks. Did you mean 'target'?"),
        (Sequence[Inner], [{"blocks": 1}], "k[0].target: missing."),
        (Sequence[Text] | Sequence[Inner], ["a", {"target": "b"}], "k[1]: {'target': 'b'} is not a string of printable "
         "characters."),
        (Sequence[Text] | Sequence[Inner], [{"target": "b", "blocks": -1}], "k[0].blocks: -1 is not an integer of at "
         "least 0."),
        (Mapping[Literal["norm", "loss"], bool], {"norn": True}, "k.norn: 'norn' is not one of norm, loss. Did you mean "
         "'norm'?"),
    ],
)  # fmt: skip
def test_messages_say_where_what_and_what_instead(hint, value, said):
    with pytest.raises(ConfigError) as caught:
        accept(hint, value, "k")
    assert str(caught.value) == said


def test_what_is_constructed_directly_is_checked_too():
    with pytest.raises(ConfigError, match=r"^blocks: -1 is not"):
        Inner(target="x", blocks=-1)


@pytest.mark.parametrize("values", ["current", ["recipe"], None, 3])
def test_options_that_are_no_mapping_are_refused(values):
    with pytest.raises(ConfigError, match=r"^algorithms\.x: .* is not a mapping. It takes target, blocks"):
        from_mapping(Inner, values, "algorithms.x")


def test_arguments_are_checked_by_the_annotations_of_who_takes_them():
    def build(d_model: int, ratio: PositiveNumber, *, anything=None) -> None:
        """As a registry would call it."""

    check_arguments(build, {"d_model": 4, "ratio": 2, "anything": object()}, "model")
    with pytest.raises(ConfigError, match=r"^model\.ratio: -1 is not a number above 0\.$"):
        check_arguments(build, {"ratio": -1}, "model")
