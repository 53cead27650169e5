"""Memory that the emulation works in again and again, because a fresh 32 MB buffer faults in page by page."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from foundry_fp8.compat.fake_tensor import FakeTensor

__all__ = ["readable", "scratch"]

_KEPT = 1 << 24
"""Elements of the largest buffer that is kept: 64 MiB. Larger ones are made anew each time."""

_buffers = threading.local()


def readable(x: Tensor) -> bool:
    """Whether values of ``x`` can be looked at for free: on a CPU, and not in a dry run on fake tensors."""
    return x.device.type == "cpu" and x.numel() > 0 and not isinstance(x, FakeTensor)


def scratch(name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """A float32 CPU tensor of ``shape``: the same memory at every call of this thread with this ``name``."""
    size = torch.Size(shape).numel()
    if size > _KEPT:
        return torch.empty(shape, dtype=torch.float32, device="cpu")
    buffer = getattr(_buffers, name, None)
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # a buffer made in an evaluation serves the training after it
            buffer = torch.empty(size, dtype=torch.float32, device="cpu")
        setattr(_buffers, name, buffer)
    return buffer[:size].view(shape)
