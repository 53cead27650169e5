"""Whether a device has room for a model's transposed FP8 weights between a forward and its backward: ``cache_weights: auto``.

It is asked between two forwards, once a whole pass has shown what a run takes; for an optimizer that has not stepped by then,
16 bytes an element stay free (a float32 copy, two moments, a gradient). Room is what the allocator has never reserved, less a tenth
of the device. Each rank finds its own: what is kept changes no bit and no collective.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from foundry_fp8.config import format_bytes
from foundry_fp8.layers.linear import FP8Linear

__all__ = ["Room", "unused_memory"]

log = logging.getLogger(__name__)
OPTIMIZER_BYTES = 16


class Room:
    """What is known of one model.

    Attributes:
        there: Whether there is room; ``None`` where nobody can say yet.
        stepped: Whether an optimizer has stepped since the first forward.
    """

    def __init__(self) -> None:
        self.there: bool | None = None
        self.stepped = False
        self._forwards = 0

    def look(self, model: nn.Module) -> None:
        """A training forward of ``model`` begins."""
        self._forwards += 1
        if self._forwards == 1:
            return
        wanted = sum(module.weight.numel() for module in model.modules() if isinstance(module, FP8Linear))
        later = 0 if self.stepped else OPTIMIZER_BYTES * sum(p.numel() for p in model.parameters())
        unused = unused_memory(next(model.parameters()).device)
        self.there = wanted + later <= unused or (False if self.stepped else None)
        if self.there:
            kept = f"{format_bytes(wanted)} of {format_bytes(unused)} unused"
            log.info("cache_weights: auto keeps transposed FP8 weights from forward to backward: %s.", kept)


def unused_memory(device: torch.device) -> int:
    """Bytes that no allocator has reserved so far, less a tenth of all; none off a GPU."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return 0
    free, total = torch.cuda.mem_get_info(device)
    taken_again = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    return free - taken_again - total // 10
