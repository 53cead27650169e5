"""Collectives that somebody else starts, such as FSDP's, wait no longer than we say.

Cause: FSDP gives its waits no limit. gloo has that of when a group was made: ``set_timeout`` changes nothing in torch 2.7, and a
reduce-scatter's wait takes no limit in any torch (``TensorShardWork`` in
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). So another thread waits. Scope: this
process's waits while it is inside; not for NCCL, where waiting does not hold up the host. Remove when gloo follows ``set_timeout``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import torch.distributed as dist

__all__ = ["bounded_waits"]


@contextlib.contextmanager
def bounded_waits(limit: float, in_vain: Callable[[], bool]) -> Iterator[None]:
    """Inside, a wait raises ``RuntimeError`` after ``limit`` seconds, or once it is ``in_vain``, which is asked twice a second."""
    works: Any = dist.Work
    theirs = works.wait

    def wait(work: Any, *given: Any) -> Any:
        found: futures.Future[Any] = futures.Future()

        def wait_here() -> None:
            try:
                found.set_result(theirs(work, *given))
            except Exception as error:
                found.set_exception(error)

        threading.Thread(target=wait_here, daemon=True).start()
        until = time.monotonic() + limit
        while True:
            with contextlib.suppress(futures.TimeoutError):
                return found.result(0.5)
            if time.monotonic() > until or in_vain():
                raise RuntimeError(f"a collective was waited for in vain, at most {limit:g} s")

    works.wait = wait
    try:
        yield
    finally:
        works.wait = theirs
