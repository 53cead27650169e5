"""Which elements of something long are read in place of all of them."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

__all__ = ["spread", "spread_rows"]


@functools.lru_cache(maxsize=256)
def spread(count: int, sample: int, device: torch.device) -> Tensor:
    """At most ``sample`` indices below ``count``, int64, sorted, evenly spread and the same in every call.

    They follow the golden ratio: a stride would read the same place of every sequence.
    """
    golden = (math.sqrt(5) - 1) / 2
    places = sorted({int(i * golden % 1.0 * count) for i in range(sample)})
    return torch.tensor(places, dtype=torch.int64, device=device)


def spread_rows(x: Tensor, sample: int) -> tuple[Tensor, Tensor]:
    """Rows of each matrix of ``x``, ``[..., R, C]``: those of :func:`spread`, and the one with the largest value (NaN is the largest).

    Returns:
        Their indices ``[..., n]``, and how many rows each stands for, float64 ``[n]``: the last counts for itself.
    """
    rows = spread(x.shape[-2], sample, x.device)
    largest = torch.maximum(x.amax(-1), -x.amin(-1)).argmax(-1, keepdim=True)
    weight = torch.full((len(rows) + 1,), x.shape[-2] / len(rows), dtype=torch.float64, device=x.device)
    weight[-1] = 1.0
    return torch.cat([rows.expand(*largest.shape[:-1], -1), largest], -1), weight
