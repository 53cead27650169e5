"""When a rule of ``recipe`` holds: in Composer's times, a function of what the run has finished."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from foundry_fp8.config import ConfigError

__all__ = ["Clock", "Moment", "clocks", "length_of", "parse_moment"]

Clock = Mapping[str, float]  # unit -> how much of it a run has finished
_TIME = re.compile(r"(\d{1,18}(?:\.\d{1,18})?(?:e\+?\d\d?)?)([KMBT]?) ?(ba|ep|sp|tok|dur)", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Moment:
    """``value`` after the start: batches (``ba``), epochs, samples, tokens, or a share of the run (``dur``)."""

    value: float
    unit: str = "ba"

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"

    def within(self, length: Moment | None) -> Moment:
        """A share of a run of ``length`` in that unit, cut off as Composer's schedulers cut it; others, and one of epochs, as they are."""
        if self.unit != "dur" or length is None or length.unit not in ("ba", "sp", "tok"):
            return self
        return Moment(int(self.value * length.value), length.unit)


def parse_moment(value: Any, key: str) -> Moment | None:
    """``100ba``, ``20Btok``, ``2ep``, ``0.9dur``, or an integer, of batches; ``ConfigError`` for all else, wall-clock time too."""
    if value is None or isinstance(value, Moment):
        return value
    said = f"{value}ba" if type(value) is int else value if isinstance(value, str) else ""
    found = _TIME.fullmatch(re.sub(r"(?<=\d)_(?=\d)", "", said))
    number = Decimal(0) if found is None else Decimal(found[1]).scaleb(3 * " KMBT".index(found[2] or " "))
    share = found is not None and found[3] == "dur"
    if found is None or number >= 10**18 or (number > 1 if share else number != int(number)):
        known = "batches (1000ba, or 1000), tokens (20Btok), samples (1000sp), epochs (2ep) or a share of the run from 0 to 1 (0.9dur)"
        raise ConfigError(f"{key}: {value!r} is no time. Write {known}.")
    return Moment(float(number) if share else int(number), found[3])


def length_of(duration: Any) -> Moment | None:
    """The length of a run from Composer's ``max_duration``; no share is known of one in another unit than a rule can have (``sec``)."""
    try:
        return parse_moment(f"{duration}ep" if isinstance(duration, int) else duration and str(duration), "")
    except ConfigError:
        return Moment(math.inf, "sec")


def clocks(moments: Iterable[Moment], length: Moment | None = None) -> list[Clock]:
    """A time before, between and after ``moments`` that a run of ``length`` may come to; units are combined freely."""
    ends = {"dur": 1.0, **({length.unit: length.value} if length else {})}
    cuts: dict[str, set[float]] = defaultdict(lambda: {0})
    for there in (moment.within(length) for moment in moments):
        cuts[there.unit] |= {there.value} if there.value < ends.get(there.unit, math.inf) else set()
    return [dict(zip(cuts, at, strict=True)) for at in itertools.product(*map(sorted, cuts.values()))]
