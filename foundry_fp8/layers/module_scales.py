"""Delayed scaling's state by module name: what a checkpoint holds of it, and when it is updated."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from foundry_fp8.layers.delayed_scaling import DelayedScalingState, DelayedSlot
from foundry_fp8.layers.second_derivative import refuse_transforms
from foundry_fp8.numerics.recipes import DelayedScaling

__all__ = ["FRESH_STATE", "ModuleScales"]

log = logging.getLogger(__name__)
_ROOM = "the scales of gradients leave room for as many times larger ones in the first pass, which is not that of the run before"
FRESH_STATE = "To start with fresh FP8 state on purpose, resume with `load_ignore_keys: [state/algorithms]`."
"""The way out that every refusal to load FP8 state names."""


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

    def attach(self, model: nn.Module) -> None:
        """Begin a pass whenever ``model``, the root that is called in training, begins a training forward."""
        self.state.group.follow(model)
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward, always_call=True)
        device = _device_of(model)
        if device.type == "cuda":  # at once, since a compiled layer that is called alone moves nothing
            self.state.to(device)

    @torch.compiler.disable
    def _before_forward(self, model: nn.Module, args: Any) -> None:
        trains = model.training and torch.is_grad_enabled()
        if trains and not self.state.idle:
            refuse_transforms("the model")
        self.state.begin_forward(_device_of(model), trains=trains)

    @torch.compiler.disable
    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        self.state.end_forward()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Name -> ``scale`` ``[slots]`` and ``amax_history`` ``[L, slots]``, float32 on the CPU, their ``checksum``, and over how many ranks gradients are averaged."""
        self.state.leave_meta()
        self.state.fill_joined()
        width = len(self._slots)
        ranks = torch.tensor(self.state.group.data_parallel_size(), dtype=torch.int64, device="cpu")
        scales = self.state.scale.cpu().split(width)
        histories = self.state.amax_history.cpu().split(width, dim=1)
        return {
            name: {
                "scale": scale.clone(),
                "amax_history": history.contiguous().clone(),
                "checksum": _checksum(scale, history),
                "data_parallel_size": ranks.clone(),
            }
            for name, scale, history in zip(self._modules, scales, histories, strict=True)
        }

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Take back what :meth:`state_dict` gave.

        A rank's loss is the mean of its share of the batch: on more ranks gradients are as much larger until they are
        averaged, and the first pass has room for that.

        Raises:
            RuntimeError: It is of other modules, or damaged; nothing is changed then.
        """
        self.state.leave_meta()
        if set(saved) != set(self._modules):
            lost, new = sorted(set(saved) - set(self._modules)), sorted(set(self._modules) - set(saved))
            raise RuntimeError(
                f"the checkpoint's {self._what} is of another model or selection: only in the checkpoint {lost[:4]}, "
                f"only in the model {new[:4]}. {FRESH_STATE}"
            )
        width, length = len(self._slots), len(self.state.amax_history)
        expected = (((width,), torch.float32), ((length, width), torch.float32))
        scaled_max = self.state.scaled_max[:width].cpu()
        for name, entry in saved.items():
            of = f"the checkpoint's {self._what} of {name}"
            scale, history = (cast(Tensor, entry.get(key)) for key in ("scale", "amax_history"))
            forms = tuple((tuple(getattr(x, "shape", ())), getattr(x, "dtype", type(x))) for x in (scale, history))  # fmt: skip
            if forms != expected:
                raise RuntimeError(f"{of} has shapes {forms}, expected {expected}. {FRESH_STATE}")
            scale, history = scale.cpu(), history.cpu()
            if not bool((torch.isfinite(scale) & (scale > 0)).all()) or not bool((history >= 0).all()):
                raise RuntimeError(
                    f"{of} is damaged: a scale is not positive and finite, or an amax is negative or NaN. {FRESH_STATE}"
                )
            if int(entry.get("checksum", found := _checksum(scale, history))) != int(found):
                raise RuntimeError(f"{of} is damaged: its checksum is another. {FRESH_STATE}")
            # Older states have none. A scale is of the history as it was, one pass longer, unless that held an Inf.
            amax = (
                (history[1:].amax(dim=0) if self.state.use_max else history[-1]) if length > 1 else 0 * scale
            )
            apart = (scale * amax > 1.001 * scaled_max) & torch.isfinite(amax)
            if "checksum" not in entry and bool(apart.any()):
                raise RuntimeError(f"{of} is damaged: a scale is not that of its amax history. {FRESH_STATE}")
        self.state.part()
        self.state.scale.copy_(torch.cat([saved[name]["scale"] for name in self._modules]))
        self.state.amax_history.copy_(
            torch.cat([saved[name]["amax_history"] for name in self._modules], dim=1)
        )
        now = self.state.group.data_parallel_size()
        before = min(int(entry.get("data_parallel_size", now)) for entry in saved.values())
        if now > before:
            log.warning(
                "The checkpoint's %s is of %s data parallel ranks, this run has %s: %s.",
                self._what,
                before,
                now,
                _ROOM,
            )
            room = [now / before if slot.startswith("d") else 1.0 for slot in self._slots]  # dy, do, dp, ...
            self.state.scale.div_(self.state.scale.new_tensor(room * len(self._modules)))
        self.state.begin_pass()


def _checksum(*parts: Tensor) -> Tensor:
    """0-d int64: a tensor, as all of a saved state."""
    found = functools.reduce(
        lambda known, part: zlib.crc32(part.contiguous().numpy().tobytes(), known), parts, 0
    )
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
