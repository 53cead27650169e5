"""The way between a device's memory and the host's: copies beside the computation on a GPU, plain copies on anything else.

A queue makes its copies in the order in which it was asked. So a host buffer may be given out again while copies from or to it are
still under way: whatever is done to it next is queued behind them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["CopyQueue", "CudaCopyQueue"]


class CopyQueue:
    """What a store asks of a device; here copies that are over when they return."""

    def buffer(self, nbytes: int) -> Tensor:
        """A host buffer of ``nbytes`` bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy when the computation has come to this point, and go on.

        Returns:
            The event of its end. Until the computation waits for it, the caller holds both tensors.
        """
        target.copy_(source)

    def wait(self, event: Any) -> None:
        """What the computation is given from here on runs after ``event``; the host does not wait."""


class CudaCopyQueue(CopyQueue):
    """Copies on a stream of their own, from and to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        """Pinned memory, of which torch takes the next power of two (``CachingHostAllocator``)."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Queue the copy behind what the current stream was given so far: the making of ``source``, the last use of ``target``."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait."""
        torch.cuda.current_stream(self.device).wait_event(event)
