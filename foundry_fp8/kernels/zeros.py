"""Zeroed device memory for the few numbers that kernels raise atomically, without an allocation and a launch for each.

Pieces are cut from one block that was zeroed at once. Each is given out once, so nothing has to be cleared, and a block is freed
when the last of its pieces is. Blocks are of a device and stream, on which they were zeroed.

A captured CUDA graph has to zero what it raises at every replay: while a stream captures, each piece is zeroed by itself. So it is
where operators are traced or watched, inside a torch operator, whose outputs may share no memory with one another or with an input
(:func:`unshared`; a compiled graph calls operators where nothing watches), and off the GPU, where tests look for accesses
outside of a tensor.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from foundry_fp8.compat.dispatch_mode import watching_modes

__all__ = ["PIECES", "Statistics", "statistics", "unshared"]

STRIDE = 4
"""Elements from one number to the next: each has the 16 bytes of its own that some of cuBLAS's FP8 paths ask of a scale."""
NUMBERS = 3
PIECES = 1024
"""Pieces of a block: 48 KiB."""


class Statistics(NamedTuple):
    """One piece."""

    stats: Tensor
    """float32 ``[3]``, 16 bytes apart: amax, gemm_scale, scale_inv."""
    gemm_scale: Tensor
    """The second of them, 0-d, in the same memory."""


_blocks: dict[tuple[torch.device, int], list[Statistics]] = {}
_operator = threading.local()
"""Its attribute ``runs``: how many torch operators this thread is inside of."""


@contextlib.contextmanager
def unshared() -> Iterator[None]:
    """While it is entered, :func:`statistics` in this thread are memory of their own."""
    _operator.runs = getattr(_operator, "runs", 0) + 1
    try:
        yield
    finally:
        _operator.runs -= 1


def statistics(device: torch.device, count: int) -> list[Statistics]:
    """``count`` pieces of zeros that nobody else has, for one launch or several on the current stream."""
    stream = None if getattr(_operator, "runs", 0) else _stream_of_blocks(device)
    if stream is None:
        alone = (
            torch.zeros((NUMBERS, STRIDE), dtype=torch.float32, device=device).select(1, 0)
            for _ in range(count)
        )
        return [Statistics(stats, stats.select(0, 1)) for stats in alone]
    while True:
        try:
            pieces = _blocks[device, stream]
            return [pieces.pop() for _ in range(count)]  # one thread gets each, without a lock
        except (KeyError, IndexError):  # what was left of a block is dropped
            _blocks[device, stream] = _cut(device)


def _cut(device: torch.device) -> list[Statistics]:
    with torch.inference_mode(False):  # the next piece may be saved for backward
        block = torch.zeros((PIECES, NUMBERS, STRIDE), dtype=torch.float32, device=device)
        numbers = block.select(2, 0)
        return [
            Statistics(*views)
            for views in zip(numbers.unbind(0), numbers.select(1, 1).unbind(0), strict=True)
        ]


def _stream_of_blocks(device: torch.device) -> int | None:
    """The stream whose blocks serve ``device`` now; ``None`` where each piece is zeroed by itself."""
    if device.type != "cuda" or watching_modes() or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device).cuda_stream
