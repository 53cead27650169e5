"""What watches a run can fail, and training goes on without it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

__all__ = ["SwitchesOff"]

log = logging.getLogger(__name__)


class SwitchesOff:
    """Off for the rest of the run once something in it has raised: one logged error, no hooks left.

    Attributes:
        name: As the error calls it.
        failed: Why it is off; ``None`` while it works.
    """

    name: str
    failed: str | None = None

    def detach(self) -> None:
        """Take every hook out of the model; called when training ends and when it fails. May be repeated."""

    def guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        """``function`` as a hook that cannot raise into the model and does nothing once something has failed."""

        @functools.wraps(function)
        def hook(*args: Any, **kwargs: Any) -> None:
            if self.failed is None:
                try:
                    function(*args, **kwargs)
                except Exception as error:
                    self.disable(error)

        return hook

    def disable(self, error: Exception) -> None:
        """Stop watching."""
        self.failed = f"{type(error).__name__}: {error}"
        said = "%s failed and is off for the rest of this run; training goes on. %s"
        log.error(said, self.name, self.failed, exc_info=error)
        try:
            self.detach()
        except Exception:
            log.debug("%s could not take its hooks away", self.name, exc_info=True)
