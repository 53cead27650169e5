"""The guard's statistics: what raises the alarm, how often, and what does not."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foundry_fp8
from foundry_fp8.observe.divergence.signals import DAMAGE, RULES, SIGNS, Signal


def feed(watched, values):
    return [watched.observe(float(value)) for value in values]


def noisy(levels, noise, seed):
    generator = torch.Generator().manual_seed(seed)
    levels = torch.as_tensor(levels, dtype=torch.float64)
    return (levels * torch.exp(noise * torch.randn(len(levels), generator=generator))).tolist()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), noise=st.floats(0, 0.3), name=st.sampled_from(sorted(SIGNS)))
def test_noise_around_a_level_raises_nothing(seed, noise, name):
    assert not any(feed(Signal(RULES[name]), noisy([40.0] * 400, noise, seed)))


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_falls_as_losses_do_raises_nothing(seed):
    steps = torch.arange(400.0)
    assert not any(feed(Signal(RULES["loss"]), noisy(2 + 4 * torch.exp(-steps / 60), 0.05, seed)))


def test_a_jump_raises_the_alarm_in_the_second_observation_and_a_spike_does_not():
    watched = Signal(RULES["kurtosis"])
    level, high = RULES["kurtosis"].floor, RULES["kurtosis"].floor * RULES["kurtosis"].ratio * 1.1
    assert not any(feed(watched, [level] * 20))
    assert feed(watched, [1e6, level, level, level, 1e6, level, level]) == [False] * 7
    assert feed(watched, [high, high]) == [False, True]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "factor"), [("loss", 2.0), ("kurtosis", 100.0), ("gradient_norm", 100.0)])
def test_a_slow_climb_raises_the_alarm_and_is_told_again_as_it_climbs_on(name, factor, seed):
    """Over 150 observations, 1500 batches: no ten of them differ by what a jump is."""
    watched, level = Signal(RULES[name]), max(5.0, RULES[name].floor)
    assert not any(feed(watched, noisy([level] * 60, 0.03, seed)))
    steps = torch.arange(150.0)
    alarms = feed(watched, noisy(level * factor ** (steps / 150), 0.03, seed))
    assert 1 <= sum(alarms) <= 8
    assert factor ** (alarms.index(True) / 150) < RULES[name].drift * 2


@pytest.mark.parametrize("seed", range(5))
def test_a_level_that_shifts_and_stays_is_told_once(seed):
    """Harder data: the loss goes from 2.0 to 2.7 and stays."""
    watched = Signal(RULES["loss"])
    feed(watched, noisy([2.0] * 60, 0.03, seed))
    alarms = feed(watched, noisy([2.7] * 300, 0.03, seed + 100))
    assert sum(alarms) == 1 and alarms.index(True) < 5
    assert watched.threshold > 2.7 * 1.1
    assert not any(feed(watched, noisy([2.0] * 100, 0.03, seed + 200)))


@pytest.mark.parametrize("seed", range(3))
def test_after_a_shift_a_further_climb_is_still_seen(seed):
    watched = Signal(RULES["loss"])
    feed(watched, noisy([2.0] * 60 + [2.7] * 60, 0.03, seed))
    assert any(feed(watched, noisy(2.7 * 2 ** (torch.arange(100.0) / 100), 0.03, seed)))


def test_noise_is_learned_from_all_observations():
    """A series that becomes noisy is not an alarm a spike; the estimate does not leave the large values out."""
    watched = Signal(RULES["gradient_norm"])
    feed(watched, noisy([1.0] * 60, 0.05, 0))
    quiet = watched.test.noise
    feed(watched, noisy([1.0] * 60, 0.8, 1))
    assert quiet < 0.1 and watched.test.noise > 0.5


def test_damage_is_told_while_it_lasts():
    watched = Signal(DAMAGE["noise"])
    feed(watched, [1.0] * 20)
    assert feed(watched, [40.0] * 6) == [False, True] * 3
    assert feed(watched, [1.0] * 4) == [False] * 4
    assert watched.healthy(1.0) and not watched.healthy(7.0)


def test_damage_beyond_all_doubt_needs_no_past():
    assert feed(Signal(DAMAGE["flushed"]), [0.93, 0.93]) == [False, True]
    watched = Signal(DAMAGE["flushed"])
    assert sum(feed(watched, [0.93] * 40)) == 20, "what it began with is not its yardstick"
    assert not any(feed(Signal(DAMAGE["flushed"]), [0.93] + [0.001] * 20)), (
        "the first pass of delayed scaling"
    )


def test_a_value_that_is_not_finite_is_an_alarm_at_once_and_teaches_nothing():
    for value in (math.nan, math.inf):
        assert feed(Signal(RULES["loss"]), [value]) == [True]
    watched = Signal(RULES["loss"])
    feed(watched, [2.0] * 20)
    before = watched.threshold
    feed(watched, [math.nan])
    assert watched.threshold == before


def test_differences_below_the_floor_mean_nothing():
    watched = Signal(DAMAGE["flushed"])
    feed(watched, [1e-9] * 20)
    assert not any(feed(watched, [1e-12, 4.9e-3] * 10))
    assert any(feed(watched, [0.4] * 2))


def test_damage_that_flickers_cannot_hide_in_its_own_noise():
    watched = Signal(DAMAGE["flushed"])
    feed(watched, [0.001, 0.3] * 20)
    assert any(feed(watched, [0.9] * 3))


def test_state_survives_a_checkpoint():
    watched, resumed = Signal(RULES["kurtosis"]), Signal(RULES["kurtosis"])
    feed(watched, [10.0 + step % 3 for step in range(30)] + [90.0])
    resumed.load_state_dict(watched.state_dict())
    assert resumed.threshold == watched.threshold
    assert feed(resumed, [95.0, 500.0, 900.0]) == feed(watched, [95.0, 500.0, 900.0])


@pytest.mark.parametrize("name", RULES)
def test_rules_are_sane(name):
    rule = RULES[name]
    assert 1 < rule.drift <= rule.ratio and rule.floor > 0
    assert rule.sick is None or rule.sick / rule.ratio >= rule.floor


OF_GRADIENTS = {"flushed": "gradients", "noise": "gradients", "product_noise": "dx and dW"}


def test_the_card_has_the_rules():
    """Floors of what is never zero stand for nothing and are left out."""
    card = (Path(foundry_fp8.__file__).parent / "callbacks/divergence_guard/README.md").read_text()
    rows = re.findall(r"^\| (\w+)(?: \(x, w\))? \| x (\S+) \| x (\S+) \| ([^|]*)\|([^|]*)\|$", card, re.M)
    written = {name: (ratio, drift, floor.strip(), sick.strip()) for name, ratio, drift, floor, sick in rows}
    said = {
        name: (f"{rule.ratio:g}", f"{rule.drift:g}", "" if name in ("gradient_norm", "loss") else f"{rule.floor:g}",
               "" if rule.sick is None else f"{rule.sick:g}")
        for name, rule in RULES.items()
    }  # fmt: skip
    for name in ("flushed", "noise", "product_noise"):
        ratio, drift, of_gradients, sick = said.pop(f"{name}_gradient")
        assert (ratio, drift, sick) == (*said[name][:2], said[name][3])
        said[name] = (
            ratio,
            drift,
            f"{said[name][2]} (of {OF_GRADIENTS[name]}, `{name}_gradient`: {of_gradients})",
            sick,
        )
    assert written == said
