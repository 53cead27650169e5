"""How the guards of all ranks agree, and how one that has failed does not leave the others waiting."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from composer.core import State
from composer.utils import dist

__all__ = ["everyone_works", "gather", "worst"]


def everyone_works(state: State, works: bool) -> bool:
    """Whether the guard of every rank works. A collective."""
    flag = state.device.tensor_to_device(torch.tensor([float(works)]))
    dist.all_reduce(flag, reduce_operation="MIN")
    return bool(flag.item())


def gather(state: State, mine: Sequence[float] | None, size: int) -> list[list[float]] | None:
    """Every rank's numbers, or ``None`` if the guard has failed somewhere. A collective.

    Args:
        state: Of the trainer.
        mine: This rank's; ``None`` if its guard has failed.
        size: How many they are on every rank.
    """
    if dist.get_world_size() == 1:
        return None if mine is None else [list(mine)]
    row = [0.0] * (1 + size) if mine is None else [1.0, *mine]
    rows = dist.all_gather(state.device.tensor_to_device(torch.tensor(row, dtype=torch.float64)))
    values = torch.stack(list(rows)).tolist()
    return [row[1:] for row in values] if all(row[0] for row in values) else None


def worst(state: State, mine: Sequence[float] | None, size: int) -> list[list[float]] | None:
    """The largest number of all ranks in each place, as one row; as many bytes and as little work as on one rank, however many
    there are. NaN counts as infinite. A collective; arguments and ``None`` as of :func:`gather`.
    """
    if dist.get_world_size() == 1:
        return None if mine is None else [list(mine)]
    row = torch.tensor([1.0] + [0.0] * size if mine is None else [0.0, *mine], dtype=torch.float64)
    largest = state.device.tensor_to_device(row.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf))
    dist.all_reduce(largest, reduce_operation="MAX")
    failed, *values = largest.tolist()
    return None if failed else [values]
