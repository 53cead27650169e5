"""The device that a rank trains on.

Cause: Composer keeps it in the private ``_device`` of ``state.device``
(https://github.com/mosaicml/composer/blob/v0.32.1/composer/devices/device_gpu.py); there is no public one. Remove when there is.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["device_of"]


def device_of(state: Any) -> torch.device:
    """The device of a Composer ``State``.

    Raises:
        RuntimeError: This Composer keeps it elsewhere.
    """
    device = getattr(state.device, "_device", None)
    if not isinstance(device, torch.device):
        raise RuntimeError(
            f"Composer's {type(state.device).__name__} no longer has its torch.device as _device. Install a Composer that "
            "foundry_fp8 was made for (0.32), or adapt foundry_fp8/compat/composer_device.py."
        )
    return device
