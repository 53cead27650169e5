"""What a native linear reads of its module before it launches anything."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.backends.native.plan import Plan, plan_of
from foundry_fp8.compat.module_hooks import watched
from foundry_fp8.compat.selective_checkpoint import selective_checkpoint_runs
from foundry_fp8.kernels.launch import HP_DTYPES
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.gemm_layer import FP8GemmLayer, Probe
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.shared_inputs import QuantizedInput
from foundry_fp8.numerics.recipes import GemmPrecision, Recipe

__all__ = ["Delayed", "LinearCall", "checked_dtype", "is_alone", "shared_input"]

Delayed = tuple[Tensor | None, Tensor | None]
"""Delayed scaling's scale (0-d), and where to record the amax (``None``: nowhere). Both ``None`` for the other recipes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCall:
    """What a linear's GEMMs read beside the tensors that they are differentiated for, in forward and in backward.

    Attributes:
        plan: The recipe.
        x: Delayed scaling's state of the input.
        w: The same of the weight.
        dy: The same of the output's gradient.
        fprop, dgrad, wgrad: What each GEMM runs in.
        probe: Shown every operand once.
        recipe: What the probe is shown it by.
    """

    plan: Plan
    x: Delayed = (None, None)
    w: Delayed = (None, None)
    dy: Delayed = (None, None)
    fprop: GemmPrecision = "fp8"
    dgrad: GemmPrecision = "fp8"
    wgrad: GemmPrecision = "fp8"
    probe: Probe | None = None
    recipe: Recipe | None = None

    @classmethod
    def of(cls, module: FP8GemmLayer, probe: Probe | None = None) -> LinearCall:
        """What ``module`` says now."""
        recipe, alpha = module.recipe, module.output_multiplier
        fprop, dgrad, wgrad = module.fprop, module.dgrad, module.wgrad
        assert recipe is not None
        if torch.compiler.is_compiling():
            stateless = cls(plan=plan_of(recipe, alpha), fprop=fprop, dgrad=dgrad, wgrad=wgrad)
        else:
            # By the recipe's place: hashing its fields takes longer than all else here.
            key = id(recipe), alpha, fprop, dgrad, wgrad
            found = _stateless.get(key)
            if found is None:
                plan = plan_of(recipe, alpha)
                plan = _plans.setdefault(plan, plan)
                found = _stateless[key] = recipe, cls(plan=plan, fprop=fprop, dgrad=dgrad, wgrad=wgrad)
            stateless = found[1]
        if probe is None and (module.slots is None or not recipe.uses_history):
            return stateless
        x, w, dy = _delayed_tensors(module)
        return cls(
            plan=stateless.plan, x=x, w=w, dy=dy, fprop=fprop, dgrad=dgrad, wgrad=wgrad, probe=probe, recipe=recipe,
        )  # fmt: skip

    @property
    def reads_hp(self) -> bool:
        """Whether fprop or wgrad reads x as it is."""
        return "high_precision" in (self.fprop, self.wgrad)


_stateless: dict[tuple[object, ...], tuple[Recipe, LinearCall]] = {}
"""With the recipe itself, so that no other one comes to lie in its place."""
_plans: dict[Plan, Plan] = {}
"""Equal plans are one, for good: outside of compiled graphs they are distinguished by their address."""


def checked_dtype(module: FP8GemmLayer, x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which ``module``, whose weight is ``weight``, computes on ``x``.

    Raises:
        ValueError: Another number of features: the kernels pad, so a GEMM might not notice.
        RuntimeError: Another device than the weight's.
        TypeError: A dtype that the kernels do not read.
    """
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{module.fqn}: the input is {tuple(x.shape)}; its last dimension must be in_features={weight.shape[-1]}."
        )
    if x.device != weight.device:
        raise RuntimeError(
            f"{module.fqn}: the input is on {x.device}, the weight on {weight.device}. Move one of them."
        )
    dtype = compute_dtype(x)
    if dtype not in HP_DTYPES:
        raise TypeError(f"{module.fqn}: the input is {dtype}; FP8 layers take float32, bfloat16 and float16.")
    return dtype


def shared_input(made: dict[Any, Any], call: LinearCall) -> QuantizedInput | None:
    """Where linears that read one tensor by the same scale note what they make of it; ``None`` where each has to make its own."""
    if selective_checkpoint_runs():
        return None
    scale = call.x[0]  # of delayed scaling: one tensor a slot and pass
    found: QuantizedInput = made.setdefault(
        (id(call.plan), None if scale is None else id(scale)), QuantizedInput()
    )
    return found


def _delayed_tensors(module: FP8GemmLayer) -> list[Delayed]:
    """Of x, w and dy."""
    if module.slots is None or module.recipe is None or not module.recipe.uses_history:
        return [(None, None)] * 3
    recording, slots = module.recording(), module.slots
    state = slots["x"].state
    scales, amaxes = state.in_force().scales, state.amaxes
    return [
        (scales[slot.index], amaxes[slot.index] if operand in recording else None)
        for operand, slot in slots.items()
    ]


def is_alone(member: nn.Module) -> bool:
    """Whether a linear can be computed without being called: in FP8 alone, shown to nobody, with a weight in memory."""
    if not isinstance(member, FP8Linear) or "forward" in vars(member) or watched(member):
        return False
    if "parametrizations" in member._modules:  # computed once a call
        return False
    if not member.runs_fp8 or member.probe is not None:
        return False
    fp8 = member.fprop == member.dgrad == member.wgrad == "fp8"
    return fp8 and type(member.weight) in (nn.Parameter, Tensor) and member.weight.numel() > 0
