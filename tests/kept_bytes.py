"""What a forward leaves behind for its backward."""

from collections.abc import Callable

import torch
from torch import Tensor

from foundry_fp8.planning.memory.live_bytes import meter_for


def activation_bytes(forward: Callable[[], Tensor], device: torch.device) -> int:
    """Bytes that ``forward`` leaves behind for its backward: what is live when it returns, its output left out."""
    with meter_for(device) as meter:
        out = forward()
        return meter.live - out.untyped_storage().nbytes()
