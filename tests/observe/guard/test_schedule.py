"""Which batches are measured, and when that makes an alarm."""

from __future__ import annotations

import pytest

from foundry_fp8.observe.guard.schedule import AT_ONCE, LOSSES, Schedule


def measured(schedule, batches, severity):
    """The batches that are measured up to the first alarm, and the batch of the alarm."""
    found = []
    for batch in batches:
        if schedule.due(batch):
            found.append(batch)
            if schedule.alarm(severity(batch)):
                return found, batch
    return found, None


def test_a_healthy_run_is_measured_in_turn_and_never_in_its_first_batch():
    assert measured(Schedule(5), range(21), lambda batch: 0.9) == ([5, 10, 15, 20], None)


def test_what_lasts_alarms_in_the_next_batch_and_one_bad_batch_does_not():
    assert measured(Schedule(5), range(30), lambda batch: 1.2 * (batch >= 9)) == ([5, 10, 11], 11)
    assert measured(Schedule(5), range(16), lambda batch: 1.2 * (batch == 10)) == ([5, 10, 11, 12, 15], None)


def test_what_comes_in_every_other_batch_alarms():
    assert measured(Schedule(4), range(30), lambda batch: 1.2 * (batch % 2 == 0 and batch > 6))[1] == 10


@pytest.mark.parametrize("severity", [AT_ONCE, float("inf")])
def test_an_error_as_large_as_the_gradient_alarms_at_once(severity):
    assert measured(Schedule(5), range(30), lambda batch: severity if batch >= 9 else 0.1)[1] == 10


def test_a_jump_of_the_loss_has_one_batch_measured():
    for jump, wanted in ((2.0, True), (float("nan"), True), (0.5, False), (1.02, False)):
        schedule = Schedule(1000)
        for step in range(LOSSES):
            schedule.see_loss(1.0 + 0.01 * (-1) ** step)
        assert not schedule.due(LOSSES)
        schedule.see_loss(jump)
        assert schedule.due(LOSSES + 1) is wanted
        schedule.alarm(0.1)
        assert not schedule.due(LOSSES + 2)


def test_a_falling_loss_is_no_jump():
    schedule = Schedule(1000)
    for step in range(200):
        schedule.see_loss(10.0 * 0.97**step)
        assert not schedule.due(step + 1)


def test_it_goes_on_from_its_state():
    one = Schedule(5)
    measured(one, range(11), lambda batch: 1.2 * (batch >= 10))
    two = Schedule(5)
    two.load_state_dict(one.state_dict())
    assert two.due(11) and two.alarm(1.0)
