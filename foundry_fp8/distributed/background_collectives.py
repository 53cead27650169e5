"""Collectives in the background, in the same order on every rank.

A quantised all-reduce is a chain (encode, all-to-all, sum, encode, all-gather, decode). Launching its later links from
the callbacks of the earlier ones is unsafe on gloo: it matches collectives by the order in which they are issued, and
callbacks of different buckets finish in different orders on different ranks. A queue therefore runs whole chains one
after another: on a CPU in one thread with a process group of its own, on a GPU on one side stream (where waiting for a
collective blocks the stream only, not the host).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["CollectiveQueue"]


class CollectiveQueue:
    """Runs chains of collectives on ``group`` in the order in which they are submitted.

    It alone uses ``group`` while it runs.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = None if self._stream is not None else ThreadPoolExecutor(1, "foundry_fp8-collectives")

    def submit(self, chain: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        """Run ``chain`` after everything submitted before it.

        Returns:
            A future of its result; an error in the chain is an error of the future, and so of the backward pass that
            waits for it.
        """
        if self._stream is not None:
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self.device])
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream), torch.no_grad():
                result = chain()
                result.record_stream(self._stream)
                future.set_result(result)
            return future
        done: torch.futures.Future[tuple[Tensor | None, BaseException | None]] = torch.futures.Future()

        def run() -> None:
            try:
                with torch.no_grad():
                    done.set_result((chain(), None))
            except BaseException as error:
                done.set_result((None, error))

        assert self._thread is not None
        self._thread.submit(run)
        return done.then(_unwrap)


def _unwrap(future: torch.futures.Future[tuple[Tensor | None, BaseException | None]]) -> Tensor:
    result, error = future.value()
    if error is not None:
        raise error
    assert result is not None
    return result
