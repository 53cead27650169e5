"""The guard's statistics: what raises the alarm and what does not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry_fp8.observe.divergence.signals import RULES, Rule, Signal


def signal(rule=None, **options):
    return Signal(rule or RULES["kurtosis"], **{"window": 32, "warmup": 8, "patience": 2} | options)


def feed(watched, values):
    return [watched.observe(float(value)) for value in values]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), drift=st.floats(-0.02, 0.02), noise=st.floats(0, 0.3))
def test_drifting_noise_raises_nothing(seed, drift, noise):
    generator = torch.Generator().manual_seed(seed)
    steps = torch.arange(200.0)
    values = 10 * torch.exp(drift * steps.clamp(max=60) + noise * torch.randn(200, generator=generator))
    assert not any(feed(signal(), values.tolist()))


def test_a_jump_raises_the_alarm_after_patience_and_a_spike_does_not():
    watched = signal()
    assert not any(feed(watched, [10.0] * 20))
    assert feed(watched, [100.0, 10.0, 100.0]) == [False, False, False]
    assert feed(watched, [100.0]) == [True]
    assert not watched.calm


def test_growth_by_factors_raises_the_alarm_although_the_median_follows():
    watched = signal()
    feed(watched, [10.0] * 20)
    alarms = feed(watched, [10 * 1.2**step for step in range(40)])
    first = alarms.index(True)
    assert 10 * 1.2**first < 10 * 4 * 1.2**4


def test_what_is_above_never_becomes_the_yardstick():
    watched = signal()
    feed(watched, [10.0] * 20)
    before = watched.threshold
    feed(watched, [1000.0] * 100)
    assert watched.threshold == before


def test_a_state_repeats_only_when_it_is_much_higher_and_a_damage_while_it_lasts():
    state = signal()
    feed(state, [10.0] * 20)
    assert sum(feed(state, [100.0] * 10)) == 1
    assert sum(feed(state, [300.0] * 10)) == 0
    assert sum(feed(state, [500.0] * 10)) == 1
    damage = signal(RULES["saturated"])
    feed(damage, [0.0] * 20)
    assert feed(damage, [0.01] * 6) == [False, True] * 3
    assert feed(damage, [0.0]) == [False]
    assert damage.calm


def test_no_alarm_during_the_warm_up_but_for_a_value_that_is_not_finite():
    watched = signal(RULES["loss"])
    assert feed(watched, [5.0, 50.0, 500.0]) == [False] * 3
    assert feed(watched, [math.nan]) == [True]
    assert feed(signal(RULES["loss"]), [math.inf]) == [True]


def test_differences_below_the_floor_mean_nothing():
    watched = signal(Rule(floor=1e-3, ratio=10, repeat="lasting"))
    feed(watched, [1e-9] * 20)
    assert not any(feed(watched, [1e-4, 5e-3] * 10))
    assert any(feed(watched, [2e-2] * 2))


def test_state_survives_a_checkpoint():
    watched, resumed = signal(), signal()
    values = [10.0 + step % 3 for step in range(30)] + [90.0]
    feed(watched, values)
    resumed.load_state_dict(watched.state_dict())
    assert resumed.threshold == watched.threshold
    assert feed(resumed, [95.0, 500.0]) == feed(watched, [95.0, 500.0]) == [True, True]


@pytest.mark.parametrize("name", RULES)
def test_rules_are_sane(name):
    assert RULES[name].ratio > 1
    assert RULES[name].floor > 0
