"""What all ranks saw, from what each of them sends."""

from __future__ import annotations

import math

import pytest

from foundry_fp8.observe.divergence.watch import NOT_MEASURED, Columns, together

PLACES = [(name, "y", signal) for name in ("a", "b") for signal in ("product_noise", "loss_cost")]
COLUMNS = Columns(
    signs=[("layer_000", "kurtosis"), ("layer_000", "gradient_norm")], operands=[("c", "q")], damage=PLACES
)


def rank(
    loss=2.0, kurtosis=3.0, square=9.0, amax=1.0, damage=(1.0, 0.0, 1.0, 0.0), shadow=(NOT_MEASURED,) * 4
):
    return [loss, kurtosis, square, amax, *damage, *shadow]


def test_the_worst_of_each_the_norm_of_all_gradients_and_the_mean_loss():
    seen = together(
        [
            rank(),
            rank(
                loss=4.0,
                kurtosis=5.0,
                square=16.0,
                amax=NOT_MEASURED,
                damage=(NOT_MEASURED, 0.0, math.nan, 0.0),
            ),
        ],
        COLUMNS,
    )
    assert seen.loss == 3.0 and seen.amax == {("c", "q"): 1.0}
    assert seen.signs == {("layer_000", "kurtosis"): 5.0, ("layer_000", "gradient_norm"): 5.0}
    assert (
        seen.damage == {PLACES[0]: 1.0, PLACES[1]: 0.0, PLACES[2]: math.inf, PLACES[3]: 0.0}
        and not seen.shadow
    )


def test_what_linears_cost_together_is_the_mean_of_what_is_sent_of_each():
    """Each is sent as if both cost as much; one in high precision costs nothing, and what its rung above would is told beside it."""
    seen = together([rank(damage=(1.0, 0.03, 1.0, 0.01)), rank(damage=(1.0, 0.0, 1.0, 0.005))], COLUMNS)
    assert (seen.loss_cost, seen.shadow_cost) == (pytest.approx(0.02), 0.0)
    damage, shadow = (1.0, 0.03, NOT_MEASURED, NOT_MEASURED), (NOT_MEASURED, NOT_MEASURED, 1.0, 0.01)
    seen = together([rank(damage=damage, shadow=shadow)], COLUMNS)
    assert (seen.loss_cost, seen.shadow_cost) == (pytest.approx(0.015), pytest.approx(0.005))
    assert seen.damage == {PLACES[0]: 1.0, PLACES[1]: 0.03} and seen.shadow == {
        PLACES[2]: 1.0,
        PLACES[3]: 0.01,
    }
