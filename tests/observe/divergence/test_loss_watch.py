"""Whether the loss counts as up still."""

from __future__ import annotations

import pytest

from foundry_fp8.observe.divergence.loss_watch import HORIZON, LossWatch

AFTER = 20


def shifted_twice(quiet: int) -> LossWatch:
    """2, then 4, then 8, and ``AFTER`` observations of that; the second shift is told ``quiet`` observations after the first."""
    watch = LossWatch()
    alarms = []
    for i in range(20 + 2 + quiet + AFTER):
        loss = 2.0 if i < 20 else 4.0 if i < 20 + quiet else 8.0
        if watch.observe(loss) is not None:
            alarms.append(i)
    assert alarms == [21, 21 + quiet]
    return watch


@pytest.mark.parametrize("quiet", [HORIZON - 1, HORIZON, HORIZON + 1, HORIZON + 2])
def test_a_loss_that_shifts_again_is_high_whenever_the_alarm_comes(quiet):
    watch = shifted_twice(quiet)
    assert watch.high > AFTER
    watch.observe(watch.limit)
    assert watch.high == 0, "back"


@pytest.mark.parametrize("quiet", [HORIZON - 1, HORIZON, HORIZON + 1, HORIZON + 2])
def test_what_is_high_is_forgotten_after_the_horizon(quiet):
    watch = shifted_twice(quiet)
    for _ in range(HORIZON - AFTER):
        watch.observe(8.0)
    assert watch.high > HORIZON
    watch.observe(8.0)
    assert watch.high == 0
