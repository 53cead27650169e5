"""Which elements of something long are read in place of all of them."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

__all__ = ["spread"]


@functools.lru_cache(maxsize=256)
def spread(count: int, sample: int, device: torch.device) -> Tensor:
    """At most ``sample`` indices below ``count``, int64, sorted, evenly spread and the same in every call.

    They follow the golden ratio: a stride would read the same place of every sequence.
    """
    golden = (math.sqrt(5) - 1) / 2
    return torch.tensor(
        sorted({int(i * golden % 1.0 * count) for i in range(sample)}), dtype=torch.int64, device=device
    )
