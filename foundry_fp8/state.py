"""The FP8 state of a converted model: delayed-scaling scales and histories, kept apart from the model's own state."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.backends.base import Backend
from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.delayed_scaling import DelayedScalingState
from foundry_fp8.modules.linear import OPERANDS, FP8Linear
from foundry_fp8.recipes import DelayedScaling, Recipe

__all__ = ["FP8State"]

_FORMAT_VERSION = 1


class FP8State:
    """What a converted model carries besides its parameters, and the hooks that keep it current.

    Made by the conversion, which leaves it on the model; :meth:`of` finds it again. It updates delayed scaling when a
    training forward of ``model`` begins, and wraps every forward in the backend's context.

    Args:
        model: The root that is called in training.
        modules: Its converted linears by name.
        recipe: What they were converted to.
        backend: Who runs them.
    """

    _ATTRIBUTE = "_foundry_fp8_state"

    def __init__(
        self, model: nn.Module, modules: Mapping[str, FP8Linear], recipe: Recipe, backend: Backend
    ) -> None:
        self.modules = dict(modules)
        self.recipe = recipe
        self.backend = backend
        self.delayed: DelayedScalingState | None = None
        if isinstance(recipe, DelayedScaling):
            fp8_max = [recipe.format(operand).max for _ in self.modules for operand in OPERANDS]
            self.delayed = DelayedScalingState(recipe, fp8_max)
            for index, module in enumerate(self.modules.values()):
                first = index * len(OPERANDS)
                module.slots = {op: self.delayed.slot(first + i) for i, op in enumerate(OPERANDS)}
        self._pending = False
        self._contexts = ExitStack()
        setattr(model, self._ATTRIBUTE, self)
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward, always_call=True)

    @classmethod
    def of(cls, model: nn.Module) -> FP8State | None:
        """The state of a converted model (wrapped by DDP, ``torch.compile`` or not), or ``None``."""
        for module in model.modules():
            found = module.__dict__.get(cls._ATTRIBUTE)
            if found is not None:
                return found
        return None

    def update(self) -> None:
        """Finish the running pass of delayed scaling; a collective on every rank if a training forward ran since the last."""
        if self.delayed is not None and self._pending:
            self._pending = False
            self.delayed.update()

    @torch.compiler.disable
    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if self.delayed is not None:
            self.delayed.to(next(iter(self.modules.values())).weight.device)
        # A recompute of the root itself belongs to the pass that is running.
        if model.training and torch.is_grad_enabled() and not inside_backward():
            self.update()
            self._pending = True
        if any(module.runs_fp8 for module in self.modules.values()):
            self._contexts.enter_context(self.backend.forward_context(self.recipe))

    @torch.compiler.disable
    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        self._contexts.close()

    def state_dict(self) -> dict[str, Any]:
        """Fixed-shape float32 tensors by module name, numbers and strings: loads with ``weights_only=True``.

        Returns:
            ``recipe`` (its fields), ``backend``, and for the delayed recipe ``modules``: name -> ``scale`` ``[3]`` and
            ``amax_history`` ``[L, 3]``, the operands in the order x, w, dy.
        """
        modules: dict[str, dict[str, Tensor]] = {}
        if self.delayed is not None:
            width = len(OPERANDS)
            scales = self.delayed.scale.cpu().split(width)
            histories = self.delayed.amax_history.cpu().split(width, dim=1)
            modules = {
                name: {"scale": scale.clone(), "amax_history": history.contiguous().clone()}
                for name, scale, history in zip(self.modules, scales, histories, strict=True)
            }
        return {
            "version": _FORMAT_VERSION,
            "recipe": self.recipe.to_dict(),
            "backend": self.backend.name,
            "modules": modules,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave.

        Raises:
            RuntimeError: The state is of another recipe or another model, or damaged; nothing is changed then.
        """
        way_out = (
            "To start with fresh FP8 state on purpose, resume with `load_ignore_keys: [state/algorithms]`."
        )
        missing = {"version", "recipe", "modules"} - set(state)
        if missing or state["version"] != _FORMAT_VERSION:
            raise RuntimeError(
                f"the checkpoint's FP8 state is not readable (missing {sorted(missing)}, version "
                f"{state.get('version')!r}, expected {_FORMAT_VERSION}). {way_out}"
            )
        if dict(state["recipe"]) != self.recipe.to_dict():
            raise RuntimeError(
                f"the checkpoint's FP8 state was made by the recipe {dict(state['recipe'])}, this run uses "
                f"{self.recipe.to_dict()}. Set algorithms.fp8.recipe to the former. {way_out}"
            )
        if self.delayed is None:
            return
        saved = state["modules"]
        if set(saved) != set(self.modules):
            lost, new = sorted(set(saved) - set(self.modules)), sorted(set(self.modules) - set(saved))
            raise RuntimeError(
                f"the checkpoint's FP8 state is of another model or selection: only in the checkpoint {lost[:4]}, "
                f"only in the model {new[:4]}. {way_out}"
            )
        history_len = len(self.delayed.amax_history)
        for name, entry in saved.items():
            scale, history = entry.get("scale"), entry.get("amax_history")
            shapes = tuple(getattr(scale, "shape", ())), tuple(getattr(history, "shape", ()))
            if shapes != ((3,), (history_len, 3)):
                raise RuntimeError(
                    f"the checkpoint's FP8 state of {name} has shapes {shapes}, expected {((3,), (history_len, 3))}. "
                    f"{way_out}"
                )
            if not bool(torch.isfinite(scale).all()) or bool((scale <= 0).any()) or bool((history < 0).any()):
                raise RuntimeError(
                    f"the checkpoint's FP8 state of {name} is damaged: a scale is not positive and finite, or an amax "
                    f"is negative. {way_out}"
                )
        device = self.delayed.scale.device
        self.delayed.scale = torch.cat([saved[name]["scale"] for name in self.modules]).to(device)
        self.delayed.amax_history = torch.cat(
            [saved[name]["amax_history"] for name in self.modules], dim=1
        ).to(device)
        self._pending = bool((self.delayed.amax_history[0] != 0).any())
