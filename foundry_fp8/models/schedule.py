"""The warmup-stable-decay schedule, ``scheduler: {name: wsd, ...}``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from composer.core import State, Time
from composer.optim import ComposerScheduler

from foundry_fp8.config import ConfigError, Parse, at_least, at_most, check_arguments

__all__ = ["WarmupStableDecayScheduler", "wsd_multiplier"]


def _time(value: Any, key: str) -> Time:
    if isinstance(value, Time) and value.value >= 0:
        return value
    if isinstance(value, str) and re.fullmatch(r"\d+(iter|ep|ba|sp|tok|sec)|\d*\.?\d+dur", value):
        return Time.from_timestring(value)
    raise ConfigError(f"{key}: {value!r} is not a time. Write it like 100ba, 1000000tok, 2ep or 0.1dur.")


Duration = Annotated[Any, Parse(_time, "a time (100ba, 0.1dur)")]


def wsd_multiplier(time: float, warmup: float, decay: float, end: float, alpha_f: float, shape: str) -> float:
    """The learning rate's multiplier, all times in one unit.

    ``t / warmup``, then 1, then over the last ``decay`` with ``u`` from 0 to 1
    ``alpha_f + (1 - alpha_f) (1 - sqrt(u))`` (or ``1 - u``).
    """
    if time < warmup:
        return time / warmup
    if decay <= 0 or time <= end - decay:
        return 1.0
    u = min((time - (end - decay)) / decay, 1.0)
    return alpha_f + (1.0 - alpha_f) * (1.0 - (u**0.5 if shape == "1-sqrt" else u))


class WarmupStableDecayScheduler(ComposerScheduler):
    """Linear warmup, a constant learning rate, and a decay at the end.

    Args:
        t_warmup: Such as ``2500ba``, ``1000000tok`` or ``0.02dur``.
        t_decay: The decay's length. Default: the last fifth.
        t_max: When the decay ends.
        alpha_f: The multiplier at the end.
        shape: ``1-sqrt``, or ``linear``.

    Raises:
        ConfigError: A value out of range, or warmup and decay that overlap.

    Source:
        Hagele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (arXiv 2405.18392).
    """

    def __init__(
        self,
        t_warmup: Duration,
        t_decay: Duration = "0.2dur",
        t_max: Duration = "1dur",
        alpha_f: Annotated[float, at_least(0), at_most(1)] = 0.0,
        shape: Literal["1-sqrt", "linear"] = "1-sqrt",
    ) -> None:
        given = {"t_warmup": t_warmup, "t_decay": t_decay, "t_max": t_max, "alpha_f": alpha_f, "shape": shape}
        check_arguments(WarmupStableDecayScheduler, given, "scheduler")
        self.t_warmup, self.t_decay, self.t_max = t_warmup, t_decay, t_max
        self.alpha_f, self.shape = alpha_f, shape

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """The multiplier now; ``ssr`` stretches every time but the warmup, as in Composer's schedulers."""
        end = _in_units_of_duration("t_max", self.t_max, state) * ssr
        warmup = _in_units_of_duration("t_warmup", self.t_warmup, state)
        decay = _in_units_of_duration("t_decay", self.t_decay, state) * ssr
        if warmup + decay > end:
            raise ConfigError(
                f"scheduler.t_warmup: {self.t_warmup} and t_decay {self.t_decay} do not fit into {self.t_max}."
            )
        assert state.max_duration is not None
        now = state.timestamp.get(state.max_duration.unit).value
        return wsd_multiplier(now, warmup, decay, end, self.alpha_f, self.shape)


def _in_units_of_duration(key: str, value: str | Time, state: State) -> float:
    """``value`` in the unit of ``max_duration``."""
    assert state.max_duration is not None
    time = Time.from_input(value)
    if time.unit.value == "dur":
        return time.value * state.max_duration.value
    if time.unit != state.max_duration.unit:
        raise ConfigError(
            f"scheduler.{key}: {value} is not in the unit of max_duration ({state.max_duration}), nor in dur."
        )
    return float(time.value)
