"""Which option each block takes: the least added time whose predicted peak meets a budget. Pure arithmetic, deterministic.

The peak of a step is the largest of, with blocks numbered in forward order and ``kept[j]`` chosen for block j:

    forward of block i     before + sum(kept[j] + cached[j], j < i) + forward_peak[i] + beside_forward[i]
    the head's forward     before + sum(kept[j] + cached[j]) + head_peak
    the head's backward    before + sum(kept[j]) + head_backward_peak
    backward of block i    before + sum(kept[j], j < i) + after_head + sum(left[j], j > i) + backward_peak[i] + beside_backward[i]
    after that of block i  before + sum(kept[j], j < i) + after_head + sum(left[j], j > i) + hidden + reducing[i]
    the end of backward    end_peak

A block that moves what it saves to host memory holds ``moved[i]`` bytes more until the next block that does so begins, and again when the backward
of that block has begun: of the blocks before i the last that moves anything counts with ``kept + moved``, the others with ``kept``. It leaves
the device before the forward of block i only if block i moves something itself.

Each depends on the blocks before i only through what they hold in forward and in backward, and on that last ``moved``. So a dynamic programme over these two
sums, in the order of the blocks and apart for each last ``moved``, is exact: it is pruned to states that no other beats in both and in seconds.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Cost", "Frame", "predict_peak", "solve"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """One option of one block, measured.

    Attributes:
        kept: Bytes held between its forward and its backward.
        cached: Bytes held beside them until the whole forward is over: weights that autocast has cast and nothing keeps.
        forward_peak: Largest bytes held during its forward, over what was there before.
        backward_peak: Largest bytes held during its backward, ``kept`` and its own parameter gradients included.
        seconds: Forward plus backward.
        moved: Bytes that are in host memory instead, but for those of the latest block that has any.
    """

    kept: int
    forward_peak: int
    backward_peak: int
    seconds: float
    cached: int = 0
    moved: int = 0


@dataclasses.dataclass(frozen=True)
class Frame:
    """What a step holds outside the blocks, in bytes.

    Attributes:
        static: Parameters, buffers, optimizer state.
        before: Kept by what runs before the blocks (masks, position tables).
        head_peak: Largest held between the last block's forward and the loss, over what was there.
        head_backward_peak: Largest held between the loss and the last block's backward, over what the blocks keep.
        after_head: Held when the last block's backward starts, over what the blocks keep: gradients of the head.
        left: What each block's backward leaves behind: its parameter gradients, under FSDP what it is still reducing.
            The first block's is not asked for.
        end_peak: Largest held after the first block's backward.
        hidden: Of the hidden states between two blocks, and of their gradient.
        beside_forward: What FSDP holds beside each block's own during its forward: gathered parameters.
        beside_backward: The same during its backward, gradients of the block behind it that are being reduced included.
        reducing: What FSDP holds while a block's gradients are passed on, its own included. Empty, as those two, without FSDP.
    """

    static: int
    before: int
    head_peak: int
    head_backward_peak: int
    after_head: int
    left: tuple[int, ...]
    end_peak: int
    hidden: int = 0
    beside_forward: tuple[int, ...] = ()
    beside_backward: tuple[int, ...] = ()
    reducing: tuple[int, ...] = ()

    def blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """``(left, beside_forward, beside_backward, reducing)`` of each block."""
        nothing = (0,) * len(self.left)
        return zip(
            self.left,
            self.beside_forward or nothing,
            self.beside_backward or nothing,
            self.reducing or nothing,
            strict=True,
        )


def predict_peak(costs: Sequence[Cost], frame: Frame) -> int:
    """The peak bytes of a step in which block i runs as ``costs[i]``, ``frame.static`` included."""
    held, cached, later, tail = frame.before, 0, sum(frame.left), 0
    peak = frame.end_peak
    for cost, (left, in_forward, in_backward, reducing) in zip(costs, frame.blocks(), strict=True):
        later -= left
        backward = (
            held + frame.after_head + later + max(cost.backward_peak + in_backward, frame.hidden + reducing)
        )
        leaving = tail if cost.moved else 0
        peak = max(peak, held - leaving + cached + cost.forward_peak + in_forward, backward)
        held += cost.kept + cost.moved - leaving
        tail = cost.moved or tail
        cached += cost.cached
    return frame.static + max(peak, held + cached + frame.head_peak, held + frame.head_backward_peak)


def solve(options: Sequence[Mapping[str, Cost]], frame: Frame, budget: int) -> list[str] | None:
    """The option of each block with the least total seconds whose :func:`predict_peak` is at most ``budget``.

    Of equal options the first wins.

    Returns:
        One name a block, or ``None`` if nothing fits.
    """
    room = budget - frame.static
    if frame.end_peak > room:
        return None
    # By the last ``moved``: what is held in backward, what in forward, seconds, and the choices.
    fronts: dict[int, list[_State]] = {0: [(frame.before, frame.before, 0.0, ())]}
    later = sum(frame.left)
    for of_block, (left, in_forward, in_backward, reducing) in zip(options, frame.blocks(), strict=True):
        later -= left
        grown: dict[int, list[_State]] = {}
        for tail, front in fronts.items():
            for name, cost in of_block.items():
                leaving = tail if cost.moved else 0
                more = cost.kept + cost.moved - leaving
                own = max(cost.backward_peak + in_backward, frame.hidden + reducing)
                backward = frame.after_head + later + own
                grown.setdefault(cost.moved or tail, []).extend(
                    (held + more, forward + more + cost.cached, seconds + cost.seconds, (*chosen, name))
                    for held, forward, seconds, chosen in front
                    if forward - leaving + cost.forward_peak + in_forward <= room and held + backward <= room
                )
        fronts = {
            tail: _thin(_undominated([state for state in states if _fits_head(state, tail, frame, room)]))
            for tail, states in grown.items()
        }
    last = [state for front in fronts.values() for state in front if _fits_head(state, 0, frame, room)]
    return list(min(last, key=lambda state: state[2])[3]) if last else None


_State = tuple[int, int, float, tuple[str, ...]]


def _fits_head(state: _State, leaving: int, frame: Frame, room: int) -> bool:
    """Whether the head fits beside what the blocks hold, of which ``leaving`` may still go."""
    held, forward, _, _ = state
    return forward - leaving + frame.head_peak <= room and held - leaving + frame.head_backward_peak <= room


def _undominated(states: list[_State]) -> list[_State]:
    """Those that no other beats in both sums and in seconds, by what they hold in backward."""
    kept: list[_State] = []
    forwards: list[int] = []  # of what is kept so far, rising, with seconds strictly falling
    fastest: list[float] = []
    for state in sorted(states, key=lambda s: s[:3]):
        _, forward, seconds, _ = state
        place = bisect.bisect_right(forwards, forward)
        if place and fastest[place - 1] <= seconds + 1e-12:
            continue
        kept.append(state)
        end = place
        while end < len(forwards) and fastest[end] >= seconds:
            end += 1
        if place and forwards[place - 1] == forward:
            place -= 1
        forwards[place:end], fastest[place:end] = [forward], [seconds]
    return kept


def _thin(front: list[_State], most: int = 4000) -> list[_State]:
    """At most ``most`` states, evenly spaced, the leanest and the fastest among them (deep models of unlike blocks)."""
    if len(front) <= most:
        return front
    step = (len(front) - 1) / (most - 2)
    return [*(front[round(i * step)] for i in range(most - 1)), min(front, key=lambda state: state[2])]
