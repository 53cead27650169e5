"""Factors that two operands exchange: the function stays, and a scale or a format's range does not fit any longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from mechanisms.base import Factor, Mechanism, Size, change_gradient, keep, matching
from torch import nn


class NeuronRescaled(Mechanism):
    """Rows of the linears in front of ReLU's neurons grow by ``size``, their columns behind shrink by it (arXiv 1906.04721).

    Neither is trained from there on: a step of Adam is as large for a column that has shrunk, and the neuron is not.
    """

    def __init__(self, front: str, behind: str, neurons: Sequence[int], size: Size) -> None:
        self.front, self.behind, self.neurons, self.factor = front, behind, list(neurons), Factor(size)

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.front):
            keep(linear.weight, self.neurons, self.factor)
            keep(linear.bias, self.neurons, self.factor)
        for _, linear in matching(model, self.behind):
            keep(linear.weight, (slice(None), self.neurons), self.factor)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        factor = self.factor(step)
        for _, linear in matching(model, self.front):
            linear.weight[self.neurons] *= factor
            linear.bias[self.neurons] *= factor
        for _, linear in matching(model, self.behind):
            linear.weight[:, self.neurons] /= factor


class GrowthBeforeNorm(Mechanism):
    """Rows of linears that a norm reads grow by ``size``: the norm takes it off again (arXiv 2010.09697, 2305.17212)."""

    def __init__(self, pattern: str, rows: slice, size: Size) -> None:
        self.pattern, self.rows, self.factor = pattern, rows, Factor(size)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        factor = self.factor(step)
        for _, linear in matching(model, self.pattern):
            linear.weight[self.rows] *= factor


class QueriesGrowKeysShrink(Mechanism):
    """Queries grow by ``size`` and keys shrink by it, so that logits stay, where no norm is behind them (arXiv 2308.13137, section 3.3).

    Under FP8 attention they share a scale, as their weights do. These are not trained from there on.
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.factor = pattern, Factor(size)

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            self.queries = slice(0, attention.heads * attention.head_dim)
            self.keys = slice(self.queries.stop, self.queries.stop + attention.kv_heads * attention.head_dim)
            for rows in (self.queries, self.keys):
                keep(attention.qkv_proj.weight, rows, self.factor)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        factor = self.factor(step)
        for _, attention in matching(model, self.pattern):
            attention.qkv_proj.weight[self.queries] *= factor
            attention.qkv_proj.weight[self.keys] /= factor


class LossScale(Mechanism):
    """The gradient of the logits is multiplied by ``scale``, a power of two, that of every parameter divided by it (arXiv 1710.03740)."""

    def __init__(self, scale: Callable[[int], float]) -> None:
        self.scale, self.now = scale, 1.0

    def install(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad / self.now)
        model.get_output_embeddings().register_forward_hook(
            lambda module, args, output: change_gradient(output, lambda grad, scale=self.now: grad * scale)
        )

    def step(self, step: int, model: nn.Module) -> None:
        self.now = self.scale(step)
