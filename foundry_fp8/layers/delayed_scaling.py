"""The state of delayed scaling: scales and amax histories of a whole model, updated together.

Semantics are those of Transformer Engine's ``DelayedScaling`` (``common/recipe/delayed_scaling.cu``, the bulk kernel);
the time of the update is ours. TE updates forward tensors when the outermost ``autocast`` exits and backward tensors at
the end of the first module's backward. Here both are updated together when the next training forward begins. Between
the two moments nothing reads a scale except a recompute by activation checkpointing, which has to see the scales of the
first forward anyway: so the numbers are TE's, the recompute is bit-identical without a stash, and there is one collective
a forward pass (and one at the end of a batch) instead of two.

Everything is written in place, nothing waits for the device, and no decision is Python's: an update that has nothing to
finish changes nothing. So a captured CUDA graph that holds a training forward of the model, its backward, or both, reads
and writes the same memory at every replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.kernels.launch import triton_missing
from foundry_fp8.numerics.quantize import FLOAT32_MAX
from foundry_fp8.numerics.recipes import DelayedScaling

__all__ = ["FRESH_STATE", "DelayedScalingState", "DelayedSlot", "ModuleScales"]

FRESH_STATE = "To start with fresh FP8 state on purpose, resume with `load_ignore_keys: [state/algorithms]`."
"""The way out that every refusal to load FP8 state names."""


class DelayedSlot:
    """One tensor's place in a :class:`DelayedScalingState`."""

    __slots__ = ("_index", "_state")

    def __init__(self, state: DelayedScalingState, index: int) -> None:
        self._state = state
        self._index = index

    @property
    def scale(self) -> Tensor:
        """0-d float32, a view: what the tensor is multiplied with until the next update writes another value."""
        return self._state.scales[self._index]

    @property
    def scale_version(self) -> int:
        """Counts the writes to the scales."""
        return self._state.scale._version

    @property
    def amax_history(self) -> Tensor:
        """``[L]`` float32; entry 0 collects the running pass, the last entry is the newest finished one."""
        return self._state.amax_history[:, self._index]

    @property
    def amax(self) -> Tensor:
        """0-d float32, a view of the history's entry 0: the running pass."""
        return self._state.amaxes[self._index]

    def record(self, amax: Tensor) -> None:
        """Take ``amax`` (0-d float32) into the running pass. Recording the same tensor twice changes nothing."""
        torch.fmax(self.amax, amax, out=self.amax)


class DelayedScalingState:
    """Scales and histories of ``T`` tensors.

    Args:
        recipe: Its margin, history length, algorithm and reduction.
        fp8_max: The largest value of each tensor's format.

    Attributes:
        scale: ``[T]`` float32, 1 at first.
        amax_history: ``[L, T]`` float32, 0 at first.
        scales: The elements of ``scale``, 0-d, in its memory.
        amaxes: The same of entry 0 of the history.

    All stay where they are from the first forward on the device on: what changes is written in place.
    """

    def __init__(self, recipe: DelayedScaling, fp8_max: Sequence[float]) -> None:
        self.recipe = recipe
        self.scale = torch.ones(len(fp8_max))
        self.amax_history = torch.zeros(recipe.amax_history_len, len(fp8_max))
        self._scaled_max = torch.tensor(list(fp8_max)) * 2.0**-recipe.margin
        self._make_views()

    def slot(self, index: int) -> DelayedSlot:
        """The handle of tensor ``index``."""
        return DelayedSlot(self, index)

    def to(self, device: torch.device) -> None:
        """Move to the device that the model runs on."""
        if self.scale.device != device:
            self.scale = self.scale.to(device)
            self.amax_history = self.amax_history.to(device)
            self._scaled_max = self._scaled_max.to(device)
            self._make_views()

    def _make_views(self) -> None:
        # Through .data, each with a version counter of its own. A compiled layer saves its tensors for backward, and
        # autograd would refuse them once another layer has recorded into the same history.
        self.scales = [scale.data for scale in self.scale.unbind()]
        self.amaxes = [amax.data for amax in self.amax_history[0].unbind()]

    @torch.no_grad()
    def update(self, group: dist.ProcessGroup | None = None) -> None:
        """Finish the running pass: reduce its amaxes over the ranks, roll the histories, set the scales.

        A tensor that saw no amax in this pass (or only zeros) keeps its history and its scale, so calling this twice in a
        row changes nothing.

        Args:
            group: The ranks to reduce over where ``recipe.reduce_amax``; all of them by default.
        """
        history = self.amax_history
        shared = self.recipe.reduce_amax and dist.is_available() and dist.is_initialized()
        if shared and dist.get_world_size(group) > 1:
            dist.all_reduce(history[0], op=dist.ReduceOp.MAX, group=group)
        use_max = self.recipe.amax_compute_algo == "max"
        if history.device.type == "cuda" and triton_missing() is None:
            from foundry_fp8.kernels.delayed import update_delayed_

            update_delayed_(self.scale, history, self._scaled_max, use_max=use_max)
            return
        current = history[0].clone()
        seen = current != 0

        if use_max and len(history) > 1:
            amax = torch.fmax(history[1:].amax(dim=0), current)
        else:
            amax = current
        scale = self._scaled_max / amax
        scale = torch.where(torch.isinf(scale), FLOAT32_MAX, scale)
        self.scale.copy_(torch.where(seen & torch.isfinite(amax), scale, self.scale))

        if len(history) > 1:
            rolled = torch.cat([history[1:], current[None]])
            history.copy_(torch.where(seen, rolled, history))
        history[0].zero_()


class ModuleScales:
    """Delayed-scaling state by module name: what a checkpoint holds, and when it is updated.

    Args:
        recipe: See :class:`DelayedScalingState`.
        modules: The modules' names.
        fp8_max: The slots of each module and the largest value of each slot's format.
        what: What the state is called in messages ("FP8 state").

    Attributes:
        state: The scales and histories themselves, module after module, in the order of ``fp8_max``.
    """

    def __init__(
        self, recipe: DelayedScaling, modules: Sequence[str], fp8_max: Mapping[Any, float], what: str
    ) -> None:
        self._modules = list(modules)
        self._slots = list(fp8_max)
        self._what = what
        self.state = DelayedScalingState(recipe, [*fp8_max.values()] * len(self._modules))

    def slots(self, module: str) -> dict[Any, DelayedSlot]:
        """The slots of one module by name."""
        first = self._modules.index(module) * len(self._slots)
        return {slot: self.state.slot(first + i) for i, slot in enumerate(self._slots)}

    def begin_forward(self, model: nn.Module, device: torch.device) -> None:
        """A forward of the whole ``model`` begins on ``device``. A training forward finishes the pass before it.

        Not so a forward that activation checkpointing runs again: it belongs to the pass that is running.
        """
        self.state.to(device)
        if model.training and torch.is_grad_enabled() and not inside_backward():
            self.state.update()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Name -> ``scale`` ``[slots]`` and ``amax_history`` ``[L, slots]``, float32 on the CPU."""
        width = len(self._slots)
        scales = self.state.scale.cpu().split(width)
        histories = self.state.amax_history.cpu().split(width, dim=1)
        return {
            name: {"scale": scale.clone(), "amax_history": history.contiguous().clone()}
            for name, scale, history in zip(self._modules, scales, histories, strict=True)
        }

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Take back what :meth:`state_dict` gave.

        Raises:
            RuntimeError: It is of other modules, or damaged; nothing is changed then.
        """
        if set(saved) != set(self._modules):
            lost, new = sorted(set(saved) - set(self._modules)), sorted(set(self._modules) - set(saved))
            raise RuntimeError(
                f"the checkpoint's {self._what} is of another model or selection: only in the checkpoint {lost[:4]}, "
                f"only in the model {new[:4]}. {FRESH_STATE}"
            )
        width, length = len(self._slots), len(self.state.amax_history)
        expected = ((width,), (length, width))
        for name, entry in saved.items():
            scale, history = entry.get("scale"), entry.get("amax_history")
            shapes = tuple(getattr(scale, "shape", ())), tuple(getattr(history, "shape", ()))
            if shapes != expected:
                raise RuntimeError(
                    f"the checkpoint's {self._what} of {name} has shapes {shapes}, expected {expected}. {FRESH_STATE}"
                )
            assert isinstance(scale, Tensor) and isinstance(history, Tensor)
            if not bool(torch.isfinite(scale).all()) or bool((scale <= 0).any()) or bool((history < 0).any()):
                raise RuntimeError(
                    f"the checkpoint's {self._what} of {name} is damaged: a scale is not positive and finite, or an amax "
                    f"is negative. {FRESH_STATE}"
                )
        self.state.scale.copy_(torch.cat([saved[name]["scale"] for name in self._modules]))
        self.state.amax_history.copy_(
            torch.cat([saved[name]["amax_history"] for name in self._modules], dim=1)
        )
