"""Bytes of an optimizer's state, whether it has stepped or not, of any optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from foundry_fp8.planning.memory.measure import local_numel

__all__ = ["optimizer_bytes"]

PROBE = (64, 64)


def optimizer_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes on this rank of the states that ``optimizers`` keep from their first step on.

    What a parameter has already is counted. What it will have is that of a small parameter of its dtype after a step of an optimizer of
    the same class and settings, a CPU's, scaled up: two moments for Adam, one for Lion, fewer bytes for 8-bit states.
    """
    total = 0
    for optimizer in optimizers:
        per_element: dict[torch.dtype, float] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                if state := _bytes(optimizer.state.get(parameter, {})):
                    total += state
                    continue
                if parameter.dtype not in per_element:
                    per_element[parameter.dtype] = _probe(optimizer, parameter.dtype)
                total += round(per_element[parameter.dtype] * local_numel(parameter))
    return total


def _probe(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> float:
    parameter = nn.Parameter(torch.zeros(PROBE, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    known = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in known}
    settings |= {name: False for name in ("fused", "capturable") if settings.get(name)}
    probe = type(optimizer)([parameter], **settings)
    probe.step()
    return _bytes(probe.state[parameter]) / parameter.numel()


def _bytes(state: dict[str, object]) -> int:
    """Of the tensors with elements; steps and scales are left out."""
    return sum(
        local_numel(value) * value.element_size()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )
