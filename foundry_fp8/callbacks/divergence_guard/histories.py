"""What the histories of delayed scaling were found to be, as events of layers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from foundry_fp8.observe.divergence.amax_review import AmaxReview
from foundry_fp8.observe.divergence.ladder import Ladder
from foundry_fp8.observe.divergence.observed import Event

__all__ = ["mismatches"]

ACTS = {
    "spike": "it would rule the scale for as long as the history is",
    "stale": "the history is not of this run",
    "again": "before it was full again, so the level falls on",
}
DID = {"spike": "it is kept out of the history", "stale": "it starts afresh"}


def mismatches(reviews: Iterable[AmaxReview], ladders: Mapping[str, Ladder], batch: int) -> list[Event]:
    """What ``reviews`` found since they were asked last, by layer."""
    found: dict[str, list[Event]] = {}
    for review in reviews:
        met_at = {one.index: one for one in review.collect()}
        if not met_at:
            continue
        for name, ladder in ladders.items():
            met = [
                (operand, met_at[slot.index])
                for operand, slot in (ladder.module.slots or {}).items()
                if slot.state is review.state and slot.index in met_at
            ]
            # One event a layer: an alarm before what is no alarm.
            for operand, one in sorted(met, key=lambda pair: not pair[1].alarms)[:1]:
                is_ = ACTS["again" if one.again else one.kind]
                why = f"an amax of {one.amax:.3g} after {one.past:.3g} at most: {is_}"
                tell = functools.partial(Event, batch=batch, unit=name, signal=f"history of {operand}")
                found[name] = []
                if one.alarms:
                    alarm = tell(action="alarm", value=one.amax, threshold=one.threshold, why=why)
                    found[name].append(alarm)
                if review.acts:
                    did = DID[one.kind] if one.alarms else f"{DID[one.kind]}: {why}"
                    found[name].append(tell(action="renew", why=did))
    return [event for events in found.values() for event in events]
