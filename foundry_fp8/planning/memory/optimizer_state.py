"""Bytes of an optimizer's state, whether it has stepped or not, of any optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.planning.memory.measure import held_bytes, local_numel

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
    """Bytes an element, as what twice the elements take more: tables that do not grow with a parameter cancel."""
    known = inspect.signature(type(optimizer)).parameters
    settings: dict[str, Any] = {
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in optimizer.defaults.items()
        if name in known
    }
    settings |= {name: False for name in ("fused", "capturable") if settings.get(name)}
    rows, columns = PROBE
    parameters = [nn.Parameter(torch.zeros(n * rows, columns, dtype=dtype, device="cpu")) for n in (1, 2)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    probe = type(optimizer)(parameters, **settings)
    torch.compiler.set_stance("force_eager")(probe.step)()  # so little is not worth a compilation
    once, twice = (_bytes(probe.state[parameter]) for parameter in parameters)
    return (twice - once) / (rows * columns)


def _bytes(state: dict[str, object]) -> int:
    """Of the tensors with elements; steps are left out."""
    return sum(held_bytes(value) for value in state.values() if isinstance(value, Tensor) and value.dim())
