"""The state of delayed scaling: scales and amax histories of a whole model, updated together.

Semantics are those of Transformer Engine's ``DelayedScaling`` (``common/recipe/delayed_scaling.cu``, the bulk kernel);
the time of the update is ours. TE updates forward tensors when the outermost ``autocast`` exits and backward tensors at
the end of the first module's backward. Here both are updated together when the next training forward begins, so that there is
one collective a forward pass (and one at the end of a batch) instead of two.

A forward and its backward use the scales with which the forward began, and so does what activation checkpointing runs again,
even where other forwards have begun in between (a loss over two forwards, a pipeline): each pass has a copy of the scales,
which nothing writes any more, and a recompute finds the pass that it belongs to, in a second backward through its graph too.

Scales and histories are written in place, nothing waits for the device, and no decision is Python's: an update that has nothing
to finish changes nothing. So a captured CUDA graph that holds a training forward of the model, its backward, or both, reads
and writes the same memory at every replay.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.amax_group import AmaxGroup
from foundry_fp8.compat.autograd import inside_backward, newest_node, running_node
from foundry_fp8.kernels.launch import triton_missing
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.numerics.quantize import FLOAT32_MAX
from foundry_fp8.numerics.recipes import DelayedScaling

__all__ = ["DelayedScalingState", "DelayedSlot", "Pass", "slots_of", "states_of"]

KEPT_PASSES = 256
"""Training forwards that may wait for their backward before the scales of the oldest are forgotten."""


@dataclasses.dataclass(eq=False)
class Pass:
    """The time between two updates: usually one training forward and its backward.

    Attributes:
        number: Counts the passes.
        scales: ``T`` of 0-d float32, what its forward began with; nothing writes to them.
        start: The first node of the autograd graph that can be of this pass.
        end: The first that cannot, as far as the end of its forward is known.
        waiting: A training forward ran, and its backward has not begun.
    """

    number: int
    scales: Sequence[Tensor]
    start: int
    end: float = math.inf
    waiting: bool = False


class DelayedSlot:
    """One tensor's place in a :class:`DelayedScalingState`; of a tensor that others quantise too, maybe theirs (``joined``)."""

    __slots__ = ("index", "joined", "state")

    def __init__(self, state: DelayedScalingState, index: int) -> None:
        self.state = state
        self.index = index
        self.joined = False

    @property
    def scale(self) -> Tensor:
        """0-d float32: what the tensor is multiplied with in this pass; in a recompute, in the pass of its first forward."""
        return self.state.in_force().scales[self.index]

    @property
    def amax_history(self) -> Tensor:
        """``[L]`` float32; entry 0 collects the running pass, the last entry is the newest finished one."""
        return self.state.amax_history[:, self.index]

    @property
    def amax(self) -> Tensor:
        """0-d float32, a view of the history's entry 0: the running pass."""
        return self.state.amaxes[self.index]

    def record(self, amax: Tensor) -> None:
        """Take ``amax`` (0-d float32) into the running pass. Recording the same tensor twice changes nothing."""
        torch.fmax(self.amax, amax, out=self.amax)


class DelayedScalingState:
    """Scales and histories of ``T`` tensors.

    Args:
        recipe: Its margin, history length and algorithm.
        fp8_max: The largest value of each tensor's format.

    Attributes:
        scaled_max: ``[T]`` float32, that with the margin: over an amax it is a scale.
        use_max: Whether the largest amax of the history counts, or the latest.
        scale: ``[T]`` float32, 1 at first: what the next pass begins with.
        amax_history: ``[L, T]`` float32, 0 at first.
        amaxes: The elements of entry 0 of the history, 0-d, in its memory.
        running: The pass of the latest training forward.
        idle: While set, no layer runs the recipe, and an update does nothing.
        group: The ranks whose amaxes count.
        measuring: While set, a forward begins a pass with the scales as they are, and no update happens. See :meth:`saved`.

    Scales and histories stay where they are from the first forward on the device on: what changes is written in place.
    """

    running: Pass
    amaxes: list[Tensor]

    def __init__(self, recipe: DelayedScaling, fp8_max: Sequence[float]) -> None:
        self.recipe = recipe
        self.scale = torch.ones(len(fp8_max), dtype=torch.float32, device="cpu")
        history = (recipe.amax_history_len, len(fp8_max))
        self.amax_history = torch.zeros(history, dtype=torch.float32, device="cpu")
        self.scaled_max = torch.tensor(fp8_max, dtype=torch.float32, device="cpu") * 2.0**-recipe.margin
        self._before_meta: tuple[Tensor, Tensor, Tensor] | None = None
        self._joined: list[tuple[DelayedSlot, int, int]] = []
        self._apart: set[int] = set()
        self._places: Tensor | None = None
        self.use_max = recipe.amax_compute_algo == "max"
        self.group = AmaxGroup(recipe.amax_group)
        self.idle = self.measuring = False
        self._inside_root = False
        self._passes_begun = 0
        self._start()

    def _start(self) -> None:
        """Make what is derived from scales and histories, after their memory changed."""
        # Through .data, each with a version counter of its own. A compiled layer saves its tensors for backward, and
        # autograd would refuse them once another layer has recorded into the same history.
        self.amaxes = [amax.data for amax in self.amax_history[0].unbind()]
        self._backward_ran = False
        self._passes = [Pass(0, self.scale.clone().unbind(), start=0)]
        self._finished: list[weakref.ref[Pass]] = []
        self.running = self._passes[-1]

    def __getstate__(self) -> dict[str, Any]:
        """Without what would lose its tie to the histories' memory, or belongs to a graph that is not copied."""
        derived = ("amaxes", "running", "_passes", "_finished", "_backward_ran")
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def slot(self, index: int) -> DelayedSlot:
        """The handle of tensor ``index``."""
        return DelayedSlot(self, index)

    def join(self, slot: DelayedSlot, first: DelayedSlot) -> bool:
        """Let ``slot`` read and record where ``first`` does, whose tensor it quantises too. Waits for the device, the first time.

        Returns:
            Whether it does; not so where their pasts differ.
        """
        mine, there = slot.index, first.index
        if mine == there or mine in self._apart:
            return mine == there
        (running, *past), (theirs, *their_past) = self.amax_history[:, [mine, there]].T.tolist()
        scales = self.scale[[mine, there]].tolist()
        if past != their_past or scales[0] != scales[1] or running not in (0.0, theirs):
            self._apart.add(mine)
            return False
        self._joined.append((slot, mine, there))
        self._places = None
        slot.index, slot.joined = there, True
        return True

    def part(self) -> None:
        """Give every slot its own place back, with what it has."""
        self.fill_joined()
        for slot, own, _ in self._joined:
            slot.index, slot.joined = own, False
        self._joined, self._apart = [], set()

    def fill_joined(self) -> None:
        """Write the running pass's amaxes to the places of the joined slots."""
        if self._joined:
            if self._places is None or self._places.device != self.scale.device:
                self._places = torch.tensor(
                    [places for _, *places in self._joined], dtype=torch.int64, device=self.scale.device
                ).T
            own, there = self._places
            self.amax_history[0].index_copy_(0, own, self.amax_history[0].index_select(0, there))

    def to(self, device: torch.device) -> None:
        """Move to the device that the model runs on. What there was before a forward on ``meta`` comes back after it."""
        if self.scale.device == device:
            return
        held = self.scale, self.amax_history, self.scaled_max
        if device.type == "meta":
            self._before_meta = held
        elif self.scale.is_meta:
            assert self._before_meta is not None
            held, self._before_meta = self._before_meta, None
        with torch.inference_mode(False):  # an evaluation may be the first to run
            self.scale, self.amax_history, self.scaled_max = (tensor.to(device) for tensor in held)
            self._start()

    def leave_meta(self) -> None:
        """Have values to read and write, after a forward on ``meta`` too."""
        if self.scale.is_meta:
            self.to(torch.device("cpu"))

    def in_force(self) -> Pass:
        """The pass that the running forward belongs to."""
        alone = len(self._passes) == 1
        if torch.compiler.is_compiling() or (alone and not self._finished) or not inside_backward():
            return self.running
        node, end = running_node(), self.running.end
        if node is None:  # a hook, which computes nothing
            return self.running
        for candidate in sorted([*self._passes, *self._retained()], key=lambda p: p.number, reverse=True):
            if candidate.start <= node < end:
                return candidate
            end = candidate.start
        if alone:  # of a reentrant checkpoint inside another, and there is one forward that it can be of
            return self.running
        raise RuntimeError(
            f"activation checkpointing runs an FP8 layer again for none of the {len(self._passes)} forwards that wait for their "
            f"backward: they were more than {KEPT_PASSES}, or this is a reentrant checkpoint inside another or in a second backward. "
            "Use use_reentrant=False (activation_checkpointing_reentrant: false), or fewer forwards before a backward."
        )

    def _retained(self) -> list[Pass]:
        """Passes whose backward ran, and whose graph is still there: ``retain_graph=True`` may send another one through it."""
        return [known for reference in self._finished if (known := reference()) is not None]

    def begin_forward(self, device: torch.device, *, trains: bool) -> None:
        """A forward of the whole model, whose parameters are on ``device``, begins. A training forward finishes the pass before it.

        Not so a forward that activation checkpointing runs again: it belongs to a pass that is there.
        """
        self._inside_root = True
        if device.type not in ("cpu", "meta"):  # where parameters are kept elsewhere, the layers know better
            self.to(device)
        if trains and not inside_backward():
            self.update()
            self.running.waiting = True

    def end_forward(self) -> None:
        """A forward of the root ends: what runs until the next one is no part of it."""
        self._inside_root = False
        if not inside_backward():
            self.running.end = newest_node() + 1

    def begin_layer(self, device: torch.device, *, trains: bool) -> None:
        """A forward of one layer begins on ``device``.

        Outside of a forward of the whole model (training that calls ``model.body(...)``, evaluation that calls a method)
        the first layer that trains after a backward finishes the pass before it.
        """
        self.to(device)
        if trains and not self._inside_root and not inside_backward():
            if self._backward_ran:
                self.update()
            self.running.waiting = True
            self.running.end = math.inf

    def begin_backward(self, forward: Pass) -> None:
        """A backward reaches a layer whose forward ran in the pass ``forward``."""
        forward.waiting = False
        self._backward_ran = True

    @torch.no_grad()
    def update(self) -> None:
        """Finish the running pass: take the largest amaxes of all ranks that hold the model, roll the histories, set the scales, begin a pass.

        A tensor that saw no amax in this pass (or only zeros) keeps its history and its scale, so calling this twice in a
        row changes nothing.
        """
        if self.idle:
            return
        if self.measuring:
            self.begin_pass()
            return
        self.fill_joined()
        history = self.amax_history
        self.group.reduce_(history[0])
        if history.device.type == "cuda" and triton_missing() is None:
            from foundry_fp8.kernels.delayed import update_delayed_

            update_delayed_(self.scale, history, self.scaled_max, use_max=self.use_max)
        else:
            self.roll()
        self.begin_pass()

    def roll(self) -> None:
        """Roll the histories and set the scales in plain torch: the reference of :mod:`foundry_fp8.kernels.delayed`."""
        history = self.amax_history
        current = history[0].clone()
        seen = current != 0

        if self.use_max and len(history) > 1:
            amax = torch.fmax(history[1:].amax(dim=0), current)
        else:
            amax = current
        scale = self.scaled_max / amax
        scale = torch.where(torch.isinf(scale), FLOAT32_MAX, scale)
        self.scale.copy_(torch.where(seen & torch.isfinite(amax), scale, self.scale))

        if len(history) > 1:
            rolled = torch.cat([history[1:], current[None]])
            history.copy_(torch.where(seen, rolled, history))
        history[0].zero_()

    def begin_pass(self) -> None:
        """What runs from now on uses the scales as they are now."""
        waiting = [old for old in self._passes if old.waiting]
        finished = [*self._retained(), *(old for old in self._passes if not old.waiting)]
        self._finished = [weakref.ref(old) for old in finished]
        # Once for all linears: taking one out costs the host as much as allocating it.
        scales = self.scale.clone().unbind()
        self._passes_begun += 1  # never counted back: a cached weight is known by its scale's number
        self.running = Pass(self._passes_begun, scales, start=newest_node() + 1)
        self._passes = [*waiting[-KEPT_PASSES:], self.running]
        self._backward_ran = False

    @torch.no_grad()
    def saved(self) -> Callable[[], None]:
        """What puts scales, histories and passes back as they are now; for a measurement that runs forwards of its own."""
        scale, history = self.scale.clone(), self.amax_history.clone()
        passes, finished, running = list(self._passes), list(self._finished), self.running
        ends = [(one, one.waiting, one.end) for one in passes]
        backward_ran, inside_root = self._backward_ran, self._inside_root

        @torch.no_grad()
        def restore() -> None:
            self.scale.copy_(scale)
            self.amax_history.copy_(history)
            if self.scale.device != scale.device:  # the first forward of all moved them
                self._start()
                return
            self._passes, self._finished, self.running = list(passes), list(finished), running
            for one, waiting, end in ends:
                one.waiting, one.end = waiting, end
            self._backward_ran, self._inside_root = backward_ran, inside_root

        return restore


def slots_of(model: nn.Module) -> dict[str, Mapping[Any, DelayedSlot]]:
    """The slots of each layer of ``model`` that has some, by its clean name; of layers that were copied after the conversion too."""
    found = ((name, module.__dict__.get("slots")) for name, module in model.named_modules())
    return {clean_name(name): slots for name, slots in found if slots}


def states_of(model: nn.Module) -> list[DelayedScalingState]:
    """The states that layers of ``model`` read, in the order of the layers."""
    slots = (next(iter(found.values())) for found in slots_of(model).values())
    return list(dict.fromkeys(slot.state for slot in slots))
