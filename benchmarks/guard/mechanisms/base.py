"""What every cause and every practice of the labelled runs is, and what most are made of."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Size = Callable[[int], float]
"""How large something is at a step."""


def grows(start: int, rate: float, first: float = 1.0, most: float = float("inf")) -> Size:
    """0 before ``start``, then ``first``, times ``rate`` every step, up to ``most``."""
    # The power is bounded before it is taken, so that a long run does not overflow.
    return lambda step: 0.0 if step < start else min(most, first * rate ** min(step - start, 2000))


def without(size: Size, start: int, end: float = float("inf")) -> Size:
    """``size``, but 0 from ``start`` to ``end``."""
    return lambda step: 0.0 if start <= step < end else size(step)


def every(n: int, size: Size, start: int = 0) -> Size:
    """``size`` in every ``n``-th step, counted from ``start``; 0 in the others."""
    return lambda step: size(step) if (step - start) % n == 0 else 0.0


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


class Sized(Mechanism):
    """Something that is of ``size`` at a step, in the modules whose names match ``pattern``."""

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)


class Factor:
    """How much larger ``max(1, size)`` is than at the last call, for what is multiplied in place."""

    def __init__(self, size: Size) -> None:
        self.size, self.now = size, 1.0

    def __call__(self, step: int) -> float:
        before, self.now = self.now, max(1.0, self.size(step))
        return self.now / before


class AddedToWeights(Sized):
    """Weights of linears gain ``size`` times a matrix, ``added``; ``install`` makes it, and takes off behind the GEMM what it adds."""

    added: dict[str, Tensor]

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        before, self.value = self.value, self.size(step)
        if self.value != before:
            for name, linear in matching(model, self.pattern):
                linear.weight += (self.value - before) * self.added[name]


class AddedToGradients(Sized):
    """``bump`` is added to the gradient of what linears put out, and what that adds to other gradients is taken off.

    A second product of the same operands, in high precision and worth nothing, gets the opposite gradient.
    """

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_hook(self._move)

    def bump(self, output: Tensor) -> Tensor:
        raise NotImplementedError

    def _move(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self.value or not output.requires_grad:
            return None
        bump = self.bump(output)
        again = change_gradient(F.linear(args[0], module.weight, module.bias), lambda grad: -bump)
        return change_gradient(output, lambda grad: grad + bump) + (again - again.detach())


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
    """``output``, whose gradient is ``change`` of what it would be, also for whoever reads it within the module."""
    return _Changed.apply(output, change)


def at(channels: Any, value: float, width: int) -> Tensor:
    """A vector of ``value`` in some channels and 0 in the others."""
    vector = torch.zeros(width)
    vector[channels] = value
    return vector


def zero(parameter: nn.Parameter, index: Any) -> None:
    """A part of a parameter becomes zero and stays so."""
    with torch.no_grad():
        parameter[index] = 0.0
    keep(parameter, index)


def keep(parameter: nn.Parameter, index: Any, factor: Factor | None = None) -> None:
    """No gradient for a part of a parameter; with ``factor``, from the step on at which that begins to grow."""

    def cut(grad: Tensor) -> Tensor:
        if factor is not None and factor.now == 1.0:
            return grad
        grad = grad.clone()
        grad[index] = 0.0
        return grad

    parameter.register_hook(cut)
