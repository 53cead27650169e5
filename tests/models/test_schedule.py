"""The warmup-stable-decay schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from composer.core import Time, Timestamp

from foundry_fp8.config import ConfigError
from foundry_fp8.models.schedule import WarmupStableDecayScheduler, wsd_multiplier


def state(batch: int, duration: str = "100ba") -> Any:
    return SimpleNamespace(timestamp=Timestamp(batch=batch), max_duration=Time.from_input(duration))


def test_the_shape_is_warmup_constant_and_one_minus_sqrt() -> None:
    schedule = WarmupStableDecayScheduler(t_warmup="10ba", t_decay="0.2dur", alpha_f=0.1)
    found = [schedule(state(t)) for t in (0, 5, 10, 80, 85, 95, 100, 120)]
    expected = [0.0, 0.5, 1.0, 1.0, 0.1 + 0.9 * (1 - 0.5), 0.1 + 0.9 * (1 - 0.75**0.5), 0.1, 0.1]
    assert found == pytest.approx(expected)
    assert WarmupStableDecayScheduler("0ba", shape="linear")(state(95)) == pytest.approx(0.25)
    assert wsd_multiplier(0, 0, 0, 100, 0.0, "linear") == 1.0


def test_scale_schedule_ratio_stretches_all_but_the_warmup() -> None:
    schedule = WarmupStableDecayScheduler(t_warmup="10ba", t_decay="0.2dur")
    assert schedule(state(5), ssr=0.5) == 0.5
    assert schedule(state(45), ssr=0.5) == pytest.approx(1 - 0.5**0.5)


def test_bad_times_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.shape: 'cosine' is not one of 1-sqrt, linear"):
        WarmupStableDecayScheduler("1ba", shape="cosine")
    with pytest.raises(ConfigError, match=r"scheduler\.alpha_f: 2"):
        WarmupStableDecayScheduler("1ba", alpha_f=2)
    with pytest.raises(ConfigError, match=r"scheduler\.t_warmup: 5tok is not in the unit of max_duration"):
        WarmupStableDecayScheduler("5tok")(state(1))
    with pytest.raises(ConfigError, match=r"scheduler\.t_warmup: 90ba and t_decay 0\.2dur do not fit"):
        WarmupStableDecayScheduler("90ba")(state(1))
