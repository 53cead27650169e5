"""The comparison of ``make benchmarks``, and that the committed files are of the form it reads."""

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import linear_cpu
import regression

ROWS = [{"case": "a", "time": 0.5, "bytes": 0.25}, {"case": "planner x", "time": 0.1, "bytes": 0.1}]
SLACK = {"time": 1.2, "bytes": 1.02}


def test_equal_and_better_ratios_pass():
    assert regression.worse(ROWS, ROWS[:1], SLACK) == []
    assert regression.worse(ROWS, [{"case": "a", "time": 0.59, "bytes": 0.1}], SLACK) == []


@pytest.mark.parametrize("value", [0.61, math.nan])
def test_a_worse_ratio_is_named_with_both_figures(value):
    (line,) = regression.worse(ROWS, [{"case": "a", "time": value, "bytes": 0.25}], SLACK)
    assert line.startswith("a: time is ") and "committed 0.500, allowed 0.600" in line


def test_a_case_that_is_gone_is_named():
    assert regression.worse(ROWS, [], SLACK) == ["a: not measured any more"]


@pytest.mark.parametrize("prefix", regression.CHECKS)
def test_the_newest_committed_result_has_the_ratios(prefix):
    _, rows_of, slack = regression.CHECKS[prefix]
    rows = rows_of(regression.committed(prefix)[1])
    assert len(rows) > 3
    assert all(0 < row[ratio] < 10 for row in rows for ratio in slack)
    assert regression.worse(rows, rows, slack) == []


def test_the_newest_committed_linears_are_within_their_limits():
    rows = regression.committed("linear_cpu")[1]["rows"]
    assert {row["case"] for row in rows} >= linear_cpu.LIMITS.keys()
    assert linear_cpu.above_limits(rows) == []


@pytest.mark.parametrize("value", [0.71, math.nan])
def test_a_linear_above_its_limit_is_named(value):
    rows = [{"case": "current", "of_float32": value}, {"case": "delayed", "of_float32": 0.70}]
    (line,) = linear_cpu.above_limits(rows)
    assert line.startswith("current: ") and "limit 0.7" in line
