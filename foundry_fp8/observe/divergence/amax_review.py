"""Amax histories that do not fit the run: one pass that would poison them, or a past that is not this run's.

Delayed scaling multiplies by what the largest amax of the last L passes allows. Where that is one bad batch's, or another
run's, everything is flushed for up to L passes, from the first one on: no observation in a due batch comes in time. But
every pass's amax is known, so each update compares it with the history that it is about to enter. If they differ by more
than half of the octaves that the format has (9 of E4M3's 17.8, 16 of E5M2's 31.8), then one of both would have no more than the
other half for all of its elements, which is where they begin to be lost:

- a pass *above* is kept out of the history. A second one in a row comes in: that is a level, not a spike. What is not finite never
  does; it would hold the scale where it is.
- a pass *below* makes the history start afresh; less far below, but by more than a third of the limit (:data:`SLACK`), several in a row
  do, the more the nearer they are. If the old level comes back while it would still be remembered, it was right: it comes in at once, and
  the next time it takes twice as many passes. A history that starts afresh again before it is full, though nothing came back, was no
  other run's: what it follows is falling on.
- a pass that is *clipped*, because it is above all that the history remembers, is counted, by octaves: now and then one is by a
  little; where it happens again and again, what is large comes more rarely than the history is long.
- a pass that is kept out though another one was that the history would still remember is counted too, of gradients as well: no
  scale suits what comes and goes by so much, and it is no single bad batch.

Where nothing is remembered but the pass before (a history of one pass, or ``most_recent``), clipped passes alone are counted, each by a quarter, and of
gradients those that are so by more than two octaves.

Where histories are only looked at, each pass is judged against what would be left of its history, so that the same is told.

All of it is arithmetic on the device, in the update that delayed scaling makes anyway; nothing waits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.observe.divergence.resuming import taken

__all__ = ["AmaxReview", "Mismatch"]

OCTAVES = {fmt.max: math.log2(fmt.max / fmt.min_subnormal) for fmt in (E4M3, E5M2)}
"""By the format's maximum: from there to the smallest number above zero."""
SLACK = 1 / 3
"""Of the limit: the octaves that a pass may lie below its history for any time, 3 of E4M3's 9 and 5 of E5M2's 16."""
CLIP = 0.5
"""Octaves above the history that are not counted as clipped."""
FAR = 2.0
"""The same above a single pass where gradients are counted, too, which are often above the one before."""
FORGETFUL = 0.25
"""What a clipped pass counts where only the one before it is remembered, which many a healthy one is above."""
MEMORY = 32
"""Passes after which a clipped one counts a third."""
ENOUGH = 8
"""Passes that a history holds before it is known what is above it."""
_KEPT = ("spikes", "low", "patience", "age", "clipped", "since", "recurring")
"""One value a tensor, in the checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A pass and a history that do not go together.

    Attributes:
        index: Of the tensor in the state.
        kind: ``spike``: the pass is far above; ``stale``: the history is.
        amax: Of the pass.
        past: The largest of the history.
        threshold: What of the amax would have gone with that history.
        again: The history is stale once more, before it was full and with nothing that came back.
    """

    index: int
    kind: Literal["spike", "stale"]
    amax: float
    past: float
    threshold: float
    again: bool = False

    @property
    def alarms(self) -> bool:
        """Whether this one pass is beyond the threshold, or the level falls on; otherwise several were on the way to it, which the
        format bears.
        """
        return self.kind == "spike" or self.amax < self.threshold or self.again


class AmaxReview:
    """What :attr:`~foundry_fp8.layers.delayed_scaling.DelayedScalingState.review` calls in every update.

    Args:
        state: Whose histories.
        acts: Whether histories are changed, or mismatches only told. Then a pass that would have been kept out still takes a place
            in the history that it is left out of.

    Attributes:
        remembers: Whether scales are made of more than the pass before.
    """

    def __init__(self, state: DelayedScalingState, *, acts: bool) -> None:
        self.state = state
        self.acts = acts
        count = len(state.fp8_max)
        self._tensors = {
            "octaves": torch.tensor([OCTAVES[largest] / 2 for largest in state.fp8_max]),
            "largest": torch.tensor(state.fp8_max),
            "spikes": torch.zeros(count, dtype=torch.int32),  # passes in a row above
            "low": torch.zeros(count),  # passes in a row below, one nearer than the limit as a part of one
            "patience": torch.ones(count, dtype=torch.int32),  # of those, how many start it afresh
            "age": torch.full((count,), 2**30, dtype=torch.int32),  # passes since it did
            "clipped": torch.zeros(count),  # octaves, of late
            "since": torch.full((count,), 2**30, dtype=torch.int32),  # passes since one was kept out
            "recurring": torch.zeros(count),  # passes kept out again, of late
            "told": torch.zeros(5, count),  # spike, stale, again, amax, past: since the last look
            # Where histories stay as they are: which of their passes would not be there.
            "left_out": torch.zeros(0 if acts else len(state.amax_history) - 1, count, dtype=torch.bool),
        }
        self.remembers = state.recipe.amax_compute_algo == "max" and state.recipe.amax_history_len > 1
        self._arrived: tuple[Tensor, torch.cuda.Event] | None = None

    def attach(self) -> None:
        """Review from now on."""
        self.state.review = self

    def detach(self) -> None:
        """Review no more."""
        if self.state.review is self:
            self.state.review = None

    @torch.no_grad()
    def __call__(self, state: DelayedScalingState) -> None:
        """Compare the pass with the history, and change what does not fit."""
        if self._tensors["octaves"].device != state.amax_history.device:
            self._tensors = {name: t.to(state.amax_history.device) for name, t in self._tensors.items()}
        octaves, largest, spikes, low, patience, age, clipped, since, recurring, told, left_out = (
            self._tensors.values()
        )
        current, history = state.amax_history[0], state.amax_history[1:]
        over = torch.log2(current * state.scale / largest)
        if not self.remembers:
            finite = (current != 0) & ~torch.isinf(current)
            for counted, limit in ((clipped, CLIP), (recurring, FAR)):
                more = FORGETFUL * (over - limit).clamp(0.0, 1.0)
                torch.where(finite, counted * (1 - 1 / MEMORY) + more, counted, out=counted)
            return
        if not self.acts:
            history = history.masked_fill(left_out, 0.0)
        past = history.amax(0)
        seen = current != 0
        judged = seen & (past != 0)
        slack = SLACK * octaves
        higher = torch.where(judged, torch.log2(current) - torch.log2(past), 0.0)
        above = higher > octaves
        age.add_(seen.int()).clamp_(max=2**30)
        young = age <= len(history)
        spike = above & ~young & (spikes == 0)
        back = young & (higher > slack)
        kept_out = spike | torch.isinf(current)
        torch.where(judged, (spikes + 1) * above, spikes, out=spikes)
        below = ((-higher - slack) / (octaves - slack)).clamp(0.0, 1.0)
        enough = patience - 1e-3
        stale = (low <= enough) & (low + below > enough)
        torch.where(judged, (low + below) * (below > 0), low, out=low)
        patience.mul_(1 + back.int()).clamp_(max=2**20)
        known = (history != 0).sum(0) >= min(ENOUGH, len(history))
        over = torch.where(seen & known & ~kept_out & ~back, (over - CLIP).clamp(0.0, 1.0), 0.0)
        since.add_(seen.int()).clamp_(max=2**30)
        apart = spike & ~torch.isinf(current)
        more = (apart & (since <= len(history))).float()
        since.masked_fill_(apart, 0)
        for counted, new in ((clipped, over), (recurring, more)):
            torch.where(seen, counted * (1 - 1 / MEMORY) + new, counted, out=counted)
        again = stale & young & (patience == 1)
        for row, value in zip(told, (spike, stale, again, current, past), strict=True):
            torch.where(spike | stale, value.to(row.dtype), row, out=row)
        age.masked_fill_(stale, 0)
        low.masked_fill_(stale, 0.0)
        if self.acts:
            history.masked_fill_(stale, 0.0)
            current.masked_fill_(kept_out, 0.0)
        else:  # it rolls with the history
            rolled = torch.cat([left_out[1:] | stale, kept_out[None]])
            torch.where(seen, rolled, left_out, out=left_out)

    @property
    def clipped(self) -> Tensor:
        """``[2, T]``: by how many octaves passes were clipped of late, each by one at most; how many were kept out again, or
        where nothing is remembered by how many octaves they were far above.
        """
        # They move in the update after the state.
        both = torch.stack([self._tensors["clipped"], self._tensors["recurring"]])
        return both.to(self.state.amax_history.device)

    def forget(self) -> None:
        """Begin to count clipped passes anew."""
        self._tensors["clipped"].zero_()
        self._tensors["recurring"].zero_()

    def collect(self) -> list[Mismatch]:
        """What was found since the last call; on a GPU before the last call, so that nothing waits for it."""
        told = self._tensors["told"]
        if told.device.type == "cuda":
            before = self._arrived
            copy = torch.empty(told.shape, pin_memory=True).copy_(told, non_blocking=True)
            self._arrived = copy, torch.cuda.current_stream().record_event()
            told.zero_()
            if before is None:
                return []
            arrived, event = before
            event.synchronize()
        else:
            arrived = told
        if not bool(arrived[:2].any()):
            return []
        found = []
        for index, (spike, stale, again, amax, past) in enumerate(arrived.T.tolist()):
            if spike or stale:
                limit = 2.0 ** (OCTAVES[self.state.fp8_max[index]] / 2)
                threshold = past * limit if spike else past / limit
                kind: Literal["spike", "stale"] = "spike" if spike else "stale"
                one = Mismatch(
                    index=index, kind=kind, amax=amax, past=past, threshold=threshold, again=bool(again)
                )
                found.append(one)
        if arrived is told:
            told.zero_()
        return found

    def state_dict(self) -> dict[str, Any]:
        """By name one number for each tensor of the state; ``left_out`` ``[L - 1, T]``, empty where histories are changed."""
        return {name: self._tensors[name].tolist() for name in (*_KEPT, "left_out")}

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Take back what :meth:`state_dict` gave.

        Returns:
            The names that one of both lacks, or that are of another number of tensors; they start anew.
        """
        state, differs = taken(saved, self.state_dict())
        for name in _KEPT:
            own = self._tensors[name]
            if len(state[name]) == len(own):
                own.copy_(torch.tensor(state[name], dtype=own.dtype))
            else:
                differs.append(name)
        left_out, own = torch.tensor(state["left_out"], dtype=torch.bool), self._tensors["left_out"]
        if left_out.shape == own.shape:
            own.copy_(left_out)
        else:  # what was changed has nothing to leave out
            own.zero_()
        # Nor has what changes them from now on.
        return [name for name in differs if name != "left_out" or not self.acts]
