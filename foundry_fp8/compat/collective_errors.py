"""What a process group of ours raises arrives as it was raised.

Cause: when a collective raises, torch asks for the backend and the ranks of its group, to log them
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/c10d_logger.py, ``_get_msg_dict``). It knows the groups that it made
itself, and for any other raises ``TypeError: Invariant encountered: value was None`` in place of the error. So the group is entered
among torch's, beside the one it passes its collectives on to, once it has raised: not before, because torch keeps what is entered.
Remove when torch logs errors of groups that it did not make.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed.distributed_c10d as c10d

__all__ = ["preserves_error"]

F = TypeVar("F", bound=Callable[..., Any])


def preserves_error(collective: F) -> F:
    """For a method of a process group that has the one it stands for as ``inner``."""

    @functools.wraps(collective)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return collective(self, *args, **kwargs)
        except Exception:
            for name in ("pg_map", "pg_group_ranks"):
                known = getattr(getattr(c10d, "_world", None), name, {})
                if self.inner in known:
                    known[self] = known[self.inner]
            raise

    return call  # type: ignore[return-value]
