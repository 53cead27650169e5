"""The guard's state in a checkpoint: what is saved, and what a run makes of another run's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from foundry_fp8.callbacks.divergence_guard.config import KEY
from foundry_fp8.observe.divergence.amax_review import AmaxReview
from foundry_fp8.observe.divergence.decision import Decision
from foundry_fp8.observe.divergence.ladder import Ladder
from foundry_fp8.observe.divergence.resuming import taken
from foundry_fp8.observe.divergence.watch import Watch

__all__ = ["collected", "take_back"]

log = logging.getLogger(__name__)


def collected(
    decision: Decision | None,
    watch: Watch | None,
    reviews: Mapping[str, AmaxReview],
    events: Sequence[Mapping[str, Any]],
    losses: Sequence[float],
) -> dict[str, Any]:
    """Rungs, running statistics and events: numbers and strings only. Before training starts ``decision`` and ``watch`` are ``None``."""
    return {
        "decision": {} if decision is None else decision.state_dict(),
        "events": list(events),
        "losses": list(losses),
        "amax": {}
        if watch is None
        else {f"{name}/{operand}": value for (name, operand), value in watch.amax.items()},
        "reviews": {name: review.state_dict() for name, review in reviews.items()},
    }


def take_back(
    saved: Mapping[str, Any],
    decision: Decision,
    watch: Watch,
    reviews: Mapping[str, AmaxReview],
    ladders: Mapping[str, Ladder],
    finer: str | None,
) -> tuple[list[dict[str, Any]], list[float]]:
    """Go on with what :func:`collected` gave; the events and losses so far.

    Of other layers nothing is taken. Of another version's state it is what both have, and one warning names the rest.
    """
    state, differs = taken(saved, collected(decision, watch, reviews, [], []))
    if set(saved.get("decision", {}).get("rungs", ())) != set(ladders):
        log.warning(
            "%s: the checkpoint is of a model with other layers, or of an older guard; the guard starts afresh.", KEY
        )  # fmt: skip
        return [], []
    said, lacks = decision.load_state_dict(state["decision"])
    for one in said:
        log.warning("%s: %s: what it ran is none of its rungs now (finer: %s).", KEY, one, finer)
    differs += [f"decision/{name}" for name in lacks]
    for name, ladder in ladders.items():
        ladder.move(decision.rungs[name])
    differs += [f"reviews/{name}" for name in sorted(state["reviews"].keys() ^ reviews.keys())]
    for name in sorted(state["reviews"].keys() & reviews.keys()):
        lacks = reviews[name].load_state_dict(state["reviews"][name])
        differs += [f"reviews/{name}/{lack}" for lack in lacks]
    if differs:
        log.warning(
            "%s: the checkpoint is of another version of the guard or of other settings: %s %s not in both. What is new here starts "
            "afresh, what only the checkpoint has is dropped, and the rest goes on.",
            KEY,
            ", ".join(differs),
            "is" if len(differs) == 1 else "are",
        )
    for key, value in state["amax"].items():
        name, _, operand = key.partition("/")
        watch.amax[name, operand] = value
    return list(state["events"]), list(state["losses"])
