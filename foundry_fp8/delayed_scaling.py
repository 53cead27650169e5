"""The state of delayed scaling: scales and amax histories of a whole model, updated together.

Semantics are those of Transformer Engine's ``DelayedScaling`` (``common/recipe/delayed_scaling.cu``, the bulk kernel);
the time of the update is ours. TE updates forward tensors when the outermost ``autocast`` exits and backward tensors at
the end of the first module's backward. Here both are updated together when the next training forward begins. Between
the two moments nothing reads a scale except a recompute by activation checkpointing, which has to see the scales of the
first forward anyway: so the numbers are TE's, the recompute is bit-identical without a stash, and there is one collective
a forward pass instead of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_fp8.quantize import FLOAT32_MAX
from foundry_fp8.recipes import DelayedScaling

__all__ = ["DelayedScalingState", "DelayedSlot"]


class DelayedSlot:
    """One tensor's place in a :class:`DelayedScalingState`."""

    __slots__ = ("_index", "_state")

    def __init__(self, state: DelayedScalingState, index: int) -> None:
        self._state = state
        self._index = index

    @property
    def scale(self) -> Tensor:
        """0-d float32: what the tensor is multiplied with in this forward pass and its backward."""
        return self._state.scale[self._index]

    @property
    def amax_history(self) -> Tensor:
        """``[L]`` float32; entry 0 collects the running pass, the last entry is the newest finished one."""
        return self._state.amax_history[:, self._index]

    def record(self, amax: Tensor) -> None:
        """Take ``amax`` (0-d float32) into the running pass. Recording the same tensor twice changes nothing."""
        current = self._state.amax_history[0, self._index]
        torch.fmax(current, amax, out=current)


class DelayedScalingState:
    """Scales and histories of ``T`` tensors.

    Args:
        recipe: Its margin, history length, algorithm and reduction.
        fp8_max: The largest value of each tensor's format.

    Attributes:
        scale: ``[T]`` float32, 1 at first. Replaced, never written in place, by :meth:`update`.
        amax_history: ``[L, T]`` float32, 0 at first.
    """

    def __init__(self, recipe: DelayedScaling, fp8_max: Sequence[float]) -> None:
        self.recipe = recipe
        self.scale = torch.ones(len(fp8_max))
        self.amax_history = torch.zeros(recipe.amax_history_len, len(fp8_max))
        self._scaled_max = torch.tensor(list(fp8_max)) * 2.0**-recipe.margin

    def slot(self, index: int) -> DelayedSlot:
        """The handle of tensor ``index``."""
        return DelayedSlot(self, index)

    def to(self, device: torch.device) -> None:
        """Move to the device that the model runs on."""
        if self.scale.device != device:
            self.scale = self.scale.to(device)
            self.amax_history = self.amax_history.to(device)
            self._scaled_max = self._scaled_max.to(device)

    @torch.no_grad()
    def update(self, group: dist.ProcessGroup | None = None) -> None:
        """Finish the running pass: reduce its amaxes over the ranks, roll the histories, set the scales.

        A tensor that saw no amax in this pass (or only zeros) keeps its history and its scale, so calling this twice in a
        row changes nothing.

        Args:
            group: The ranks to reduce over where ``recipe.reduce_amax``; all of them by default.
        """
        history = self.amax_history
        if self.recipe.reduce_amax and dist.is_available() and dist.is_initialized():
            dist.all_reduce(history[0], op=dist.ReduceOp.MAX, group=group)
        current = history[0].clone()
        seen = current != 0

        if self.recipe.amax_compute_algo == "max" and len(history) > 1:
            amax = torch.fmax(history[1:].amax(dim=0), current)
        else:
            amax = current
        scale = self._scaled_max / amax
        scale = torch.where(torch.isinf(scale), FLOAT32_MAX, scale)
        self.scale = torch.where(seen & torch.isfinite(amax), scale, self.scale)

        if len(history) > 1:
            rolled = torch.cat([history[1:], current[None]])
            history.copy_(torch.where(seen, rolled, history))
        history[0].zero_()
