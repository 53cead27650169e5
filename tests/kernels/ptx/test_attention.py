"""Attention's kernels as they ship, compiled for sm_90, against their definition in float64.

The interpreter cannot see what a compiler does with P between two products: it leaves one product's registers, is rounded, changes places among the
threads, and enters the next product from registers. Each stack runs this with the Triton that it brings.
"""

import math

import pytest

from tests.kernels import test_attention as interpreted

full = pytest.mark.full
MORE = ("two-sided window, documents", "fewer queries", "more queries", "head size 80, one key head")


@pytest.mark.parametrize(
    "name", ["ragged", "wide window", *(pytest.param(name, marks=full) for name in MORE)]
)
def test_forward_and_backward(name, device):
    interpreted.test_forward_and_backward(name, device)


@pytest.mark.parametrize(
    "name", [pytest.param("ragged", marks=full), pytest.param("fewer queries", marks=full)]
)
def test_gradients_of_the_logits_in_bfloat16(name, device):
    interpreted.test_gradients_of_the_logits_in_bfloat16(name, device)


@full
def test_queries_that_see_nothing(device):
    interpreted.test_queries_that_see_nothing(device)


@pytest.mark.parametrize(
    "value", [pytest.param(math.nan, marks=full), pytest.param(math.inf, marks=full)], ids=str
)
@pytest.mark.parametrize("which", interpreted.BECOMES_NAN)
def test_what_is_not_finite_stays_visible(which, value, device):
    interpreted.test_what_is_not_finite_stays_visible(which, value, device)
