"""What a collective over a process group of ours raises arrives as it was raised.

Cause: when a collective raises, torch asks for the backend and the ranks of its group, to log them
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/c10d_logger.py, ``_get_msg_dict``). It knows the groups that it made
itself, and for any other raises ``TypeError: Invariant encountered: value was None`` in place of the error. Scope: that description; of
an unknown group it has the function's name alone. Remove when torch logs errors of groups that it did not make.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed.c10d_logger as logger

__all__ = ["preserve_errors"]


@functools.cache
def preserve_errors() -> None:
    """From now on."""
    theirs = getattr(logger, "_get_msg_dict", None)
    if theirs is None:
        return

    @functools.wraps(theirs)
    def described(func_name: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            found: dict[str, Any] = theirs(func_name, *args, **kwargs)
            return found
        except Exception:
            return {"func_name": f"{func_name}"}

    logger._get_msg_dict = described
