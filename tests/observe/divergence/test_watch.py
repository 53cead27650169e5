"""What all ranks saw, from what each of them sends."""

from __future__ import annotations

import math

import pytest

from foundry_fp8.observe.divergence.watch import BUDGET, NOT_MEASURED, Columns, together

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


@pytest.mark.parametrize("part", [0.1, 0.5, 1.0, 3.0])
def test_what_linears_cost_counts_as_far_as_the_budget_is_spent(part):
    """Each is sent as if both cost as much; a shadow counts with what runs."""
    a, b = 2 * 0.75 * part * BUDGET, 2 * 0.25 * part * BUDGET
    seen = together([rank(damage=(1.0, a, 1.0, b)), rank(damage=(1.0, 0.0, 1.0, b / 2))], COLUMNS)
    assert seen.loss_cost == pytest.approx(part * BUDGET)
    spent = min(1.0, part)
    assert seen.damage == pytest.approx(
        {PLACES[0]: 1.0, PLACES[1]: a * spent, PLACES[2]: 1.0, PLACES[3]: b * spent}
    )
    # b in high precision, and what it would cost again.
    seen = together(
        [rank(damage=(1.0, a, NOT_MEASURED, NOT_MEASURED), shadow=(NOT_MEASURED, NOT_MEASURED, 1.0, b))],
        COLUMNS,
    )
    assert seen.loss_cost == pytest.approx(0.75 * part * BUDGET)
    assert seen.damage[PLACES[1]] == pytest.approx(a * min(1.0, 0.75 * part))
    assert seen.shadow == pytest.approx({PLACES[2]: 1.0, PLACES[3]: b * spent})
