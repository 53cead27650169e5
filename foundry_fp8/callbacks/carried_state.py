"""A callback's state, carried into checkpoints by an algorithm.

Composer writes the state of callbacks into a sharded checkpoint key by key, and refuses one that lacks a key which is there
when it is loaded: state that grows during training, or a callback that is added to an older run, ends the resume. The states
of algorithms are written as one value, read whatever they hold, and one that is missing is a warning.
"""

from __future__ import annotations

from typing import Any, Protocol

from composer.core import Algorithm, Event, State
from composer.loggers import Logger

__all__ = ["CarriedState", "Stateful"]


class Stateful(Protocol):
    """What has state: plain numbers, strings, lists and mappings."""

    def carried_state(self) -> dict[str, Any]:
        """What to save."""
        ...

    def take_carried_state(self, state: dict[str, Any]) -> None:
        """Keep what was saved."""
        ...


class CarriedState(Algorithm):
    """Does nothing in training; a subclass for each owner, because Composer distinguishes algorithms by class.

    Args:
        owner: Whose state it carries.
    """

    def __init__(self, owner: Stateful) -> None:
        self.owner = owner

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def match(self, event: Event, state: State) -> bool:
        """No event: the algorithm is here for its state."""
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Never called."""

    def state_dict(self) -> dict[str, Any]:
        """The owner's state."""
        return {**super().state_dict(), **self.owner.carried_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand it to the owner."""
        self.owner.take_carried_state(state)
