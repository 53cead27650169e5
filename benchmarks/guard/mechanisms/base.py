"""What every cause and every practice of the labelled runs is, and what most are made of."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

Size = Callable[[int], float]
"""How large something is at a step."""


def grows(start: int, rate: float, first: float = 1.0, most: float = float("inf")) -> Size:
    """0 before ``start``, then ``first``, times ``rate`` every step, up to ``most``."""
    # The power is bounded before it is taken, so that a long run does not overflow.
    return lambda step: 0.0 if step < start else min(most, first * rate ** min(step - start, 2000))


def during(size: Size, end: int) -> Size:
    """``size`` until ``end``, 0 from then on."""
    return lambda step: size(step) if step < end else 0.0


class Mechanism:
    """Nothing happens."""

    def install(self, model: nn.Module) -> None:
        """Once, before surgery."""

    def step(self, step: int, model: nn.Module) -> None:
        """Before every batch, after surgery."""

    def train(self, step: int, state: Any) -> None:
        """Before every batch, after ``step``: what is Composer's state's, as the batch, the optimizer and the microbatches."""


class Several(Mechanism):
    """Several at once."""

    def __init__(self, *parts: Mechanism) -> None:
        self.parts = parts

    def install(self, model: nn.Module) -> None:
        for part in self.parts:
            part.install(model)

    def step(self, step: int, model: nn.Module) -> None:
        for part in self.parts:
            part.step(step, model)

    def train(self, step: int, state: Any) -> None:
        for part in self.parts:
            part.train(step, state)


def matching(model: nn.Module, pattern: str) -> list[tuple[str, Any]]:
    """The modules whose names match, by name; at least one."""
    found = [(name, module) for name, module in model.named_modules() if fnmatch(name, pattern)]
    if not found:
        raise ValueError(f"{pattern} matches no module")
    return found


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.change(grad), None


def change_gradient(output: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """``output``, whose gradient is ``change`` of what it would be, for whoever looks at it within the module, too."""
    return _Changed.apply(output, change)


def keep(parameter: nn.Parameter, index: Any) -> None:
    """No gradient for a part of a parameter."""

    def cut(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[index] = 0.0
        return grad

    parameter.register_hook(cut)
