"""Which option each block takes: the least added time whose predicted peak meets a budget. Pure arithmetic, deterministic.

The peak of a step is the largest of, with blocks numbered in forward order and ``kept[j]`` chosen for block j:

    forward of block i     before + sum(kept[j], j < i) + forward_peak[i]
    the head               before + sum(kept[j]) + head_peak
    backward of block i    before + sum(kept[j], j < i) + after_head + sum(left[j], j > i) + backward_peak[i]
    the end of backward    end_peak

Each depends on the blocks before i only through the sum of what they keep. So a dynamic programme over that sum, in the
order of the blocks, is exact: it is pruned to sums that are not both larger and slower than another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

__all__ = ["Cost", "Frame", "predict_peak", "solve"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """One option of one block, measured.

    Attributes:
        kept: Bytes held between its forward and its backward.
        forward_peak: Largest bytes held during its forward, over what was there before.
        backward_peak: Largest bytes held during its backward, ``kept`` and its own parameter gradients included.
        seconds: Forward plus backward.
    """

    kept: int
    forward_peak: int
    backward_peak: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Frame:
    """What a step holds outside the blocks, in bytes.

    Attributes:
        static: Parameters, buffers, optimizer state.
        before: Kept by what runs before the blocks (embedding, masks, position tables).
        head_peak: Largest held between the last block's forward and its backward, over what was there.
        after_head: Held when the last block's backward starts, over what the blocks keep: gradients of the head.
        left: What each block's backward leaves behind: its parameter gradients, under FSDP what it is still reducing.
            The first block's is not asked for.
        end_peak: Largest held after the first block's backward.
    """

    static: int
    before: int
    head_peak: int
    after_head: int
    left: tuple[int, ...]
    end_peak: int


def predict_peak(costs: Sequence[Cost], frame: Frame) -> int:
    """The peak bytes of a step in which block i runs as ``costs[i]``, ``frame.static`` included."""
    held, later = frame.before, sum(frame.left)
    peak = frame.end_peak
    for cost, left in zip(costs, frame.left, strict=True):
        later -= left
        peak = max(peak, held + cost.forward_peak, held + frame.after_head + later + cost.backward_peak)
        held += cost.kept
    return frame.static + max(peak, held + frame.head_peak)


def solve(options: Sequence[Mapping[str, Cost]], frame: Frame, budget: int) -> list[str] | None:
    """The option of each block with the least total seconds whose :func:`predict_peak` is at most ``budget``.

    Args:
        options: For each block, its options by name. Of equal ones the first wins.
        frame: The rest of the model.
        budget: Bytes, ``frame.static`` included.

    Returns:
        One name a block, or ``None`` if nothing fits.
    """
    room = budget - frame.static
    if frame.end_peak > room:
        return None
    # held bytes -> (seconds, choices); kept sorted by held, seconds strictly falling.
    front: list[tuple[int, float, tuple[str, ...]]] = [(frame.before, 0.0, ())]
    later = sum(frame.left)
    for of_block, left in zip(options, frame.left, strict=True):
        later -= left
        grown = [
            (held + cost.kept, seconds + cost.seconds, (*chosen, name))
            for held, seconds, chosen in front
            for name, cost in of_block.items()
            if held + cost.forward_peak <= room
            and held + frame.after_head + later + cost.backward_peak <= room
        ]
        front = []
        for state in sorted(grown, key=lambda s: (s[0], s[1])):
            if state[0] + frame.head_peak <= room and (not front or state[1] < front[-1][1] - 1e-12):
                front.append(state)
        front = _thin(front)
    return list(front[-1][2]) if front else None


def _thin(
    front: list[tuple[int, float, tuple[str, ...]]], most: int = 4000
) -> list[tuple[int, float, tuple[str, ...]]]:
    """At most ``most`` states, evenly spaced, the leanest and the fastest among them (deep models of unlike blocks)."""
    if len(front) <= most:
        return front
    step = (len(front) - 1) / (most - 1)
    return [front[round(i * step)] for i in range(most)]
