"""What autocast makes of a layer's input."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["autocast_type", "compute_dtype"]


def autocast_type(device: torch.device) -> str:
    """The device type that :class:`torch.autocast` takes for ``device``; the CPU's for meta tensors."""
    return device.type if torch.amp.is_autocast_available(device.type) else "cpu"


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that ``nn.Linear`` would compute in: autocast's where it is on, otherwise that of ``x``."""
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return x.dtype
    return torch.get_autocast_dtype(device_type)
