"""What autocast makes of a layer's input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["autocast_now", "autocast_type", "compute_dtype", "without_autocast"]


def autocast_type(device: torch.device) -> str:
    """The device type that :class:`torch.autocast` takes for ``device``; the CPU's for meta tensors."""
    return device.type if torch.amp.is_autocast_available(device.type) else "cpu"


def autocast_now(device: torch.device) -> Callable[[], torch.autocast]:
    """What enters the autocast of this moment again, so that a forward is repeated bit for bit."""
    kind = autocast_type(device)
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return functools.partial(torch.autocast, kind, enabled=enabled, dtype=dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that ``nn.Linear`` would compute in: autocast's where it is on, otherwise that of ``x``."""
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return x.dtype
    return torch.get_autocast_dtype(device_type)


_NOTHING: AbstractContextManager[object] = nullcontext()


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Autocast off. Nothing is entered where it is: entering takes the host as long as a launch."""
    if not torch.is_autocast_enabled(device_type):
        return _NOTHING
    off: AbstractContextManager[object] = torch.autocast(device_type, enabled=False)
    return off
