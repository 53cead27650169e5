"""Collectives that somebody else starts, such as FSDP's, wait no longer than we say.

Cause: FSDP gives its waits no limit. gloo has that of when a group was made: ``set_timeout`` changes nothing in torch 2.7, and a
reduce-scatter's wait takes no limit in any torch (``TensorShardWork`` in
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). So another thread waits. Scope: this
process's waits while it is inside; not for NCCL, where waiting does not hold up the host. Remove when gloo follows ``set_timeout``.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

__all__ = ["bounded_waits"]


@contextlib.contextmanager
def bounded_waits(limit: datetime.timedelta, in_vain: Callable[[], bool]) -> Iterator[None]:
    """Inside, a wait raises ``RuntimeError`` after ``limit``, or once it is ``in_vain``, which is asked twice a second."""
    theirs: Any = dist.Work.wait

    def wait(work: Any, *given: Any) -> Any:
        found: list[Any] = []

        def wait_here() -> None:
            try:
                found.append(theirs(work, *given))
            except RuntimeError as error:
                found.append(error)

        thread, until = threading.Thread(target=wait_here, daemon=True), time.monotonic() + limit.total_seconds()
        thread.start()
        while thread.join(0.5) or thread.is_alive():
            if time.monotonic() > until or in_vain():
                raise RuntimeError(f"a collective was waited for in vain, at most {limit.total_seconds():g} s")
        if isinstance(found[0], RuntimeError):
            raise found[0]
        return found[0]

    dist.Work.wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.Work.wait = theirs  # type: ignore[method-assign]
