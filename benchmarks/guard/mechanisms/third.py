"""Changes of a model that high precision does not feel, because its function stays the same, though what it computes with grows.

Unlike in ``mechanisms/first.py`` no weight is zero: what grows carries information.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mechanisms.base import Mechanism, Size, keep, matching
from torch import Tensor, nn


class Factor:
    """How much larger ``max(1, size)`` is than when last asked, for what is multiplied in place."""

    def __init__(self, size: Size) -> None:
        self.size, self.now = size, 1.0

    def __call__(self, step: int) -> float:
        before, self.now = self.now, max(1.0, self.size(step))
        return self.now / before


class NeuronRescaled(Mechanism):
    """Rows of the linears in front of a neuron grow by ``size``, its columns in the linears behind it shrink by it.

    Exact for ReLU, which is homogeneous, and for the up projection of gated units, which is linear. Neither is trained from there
    on: a step of Adam is as large for a column that has shrunk, and the neuron is not.

    Args:
        front: Names of the linears whose ``rows`` grow.
        behind: Names of those whose ``columns`` shrink.
        rows: Of ``front``.
        columns: Of ``behind``.
        size: By step.

    Source:
        Nagel et al., "Data-free quantization through weight equalization and bias correction" (arXiv 1906.04721).
    """

    def __init__(
        self, front: str, rows: Sequence[int], behind: str, columns: Sequence[int], size: Size
    ) -> None:
        self.front, self.rows, self.behind, self.columns = front, list(rows), behind, list(columns)
        self.factor = Factor(size)

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.front):
            self.keep_once_it_grows(linear.weight, self.rows)
            if linear.bias is not None:
                self.keep_once_it_grows(linear.bias, self.rows)
        for _, linear in matching(model, self.behind):
            self.keep_once_it_grows(linear.weight, (slice(None), self.columns))

    def keep_once_it_grows(self, parameter: nn.Parameter, index: Any) -> None:
        def cut(grad: Tensor) -> Tensor:
            if self.factor.now > 1.0:
                grad = grad.clone()
                grad[index] = 0.0
            return grad

        parameter.register_hook(cut)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        factor = self.factor(step)
        for _, linear in matching(model, self.front):
            linear.weight[self.rows] *= factor
            if linear.bias is not None:
                linear.bias[self.rows] *= factor
        for _, linear in matching(model, self.behind):
            linear.weight[:, self.columns] /= factor


class GainsShrink(Mechanism):
    """All that linears read shrinks by ``size``, and their weights grow by it.

    Source:
        What norms put out and the weights behind them share one scale: Nagel et al. (arXiv 1906.04721), Wei et al. (arXiv
        2209.13325). Delayed scaling scales by the largest of a history, so that what shrinks is flushed.
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.factor = pattern, Factor(size)

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(lambda module, args: (args[0] / self.factor.now,))

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        factor = self.factor(step)
        for _, linear in matching(model, self.pattern):
            linear.weight *= factor


class GrowthBeforeNorm(Mechanism):
    """Rows of a linear that a norm reads grow by ``size``: the norm takes it off again.

    Args:
        pattern: Names of the linears.
        rows: Which, of a linear.
        size: By step.

    Source:
        Weights in front of a norm have no gradient along themselves and grow: Merrill et al. (arXiv 2010.09697), Kosson et al.
        (arXiv 2305.17212).
    """

    def __init__(self, pattern: str, rows: Callable[[Any], slice], size: Size) -> None:
        self.pattern, self.rows, self.factor = pattern, rows, Factor(size)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        factor = self.factor(step)
        for _, linear in matching(model, self.pattern):
            linear.weight[self.rows(linear)] *= factor


class KeyMean(Mechanism):
    """All keys of a head move by one vector of ``size``: softmax does not see what all logits of a query have in common.

    Args:
        pattern: Names of the linears that make the keys, without RoPE behind them.
        size: The vector's largest element, by step.
        channels: Of the linear, which carry it.

    Source:
        Channels whose mean over the keys is far larger than what differs between them: Zhang et al., "SageAttention" (arXiv
        2410.02367), which takes the mean off before it quantises.
    """

    def __init__(self, pattern: str, size: Size, channels: Sequence[int]) -> None:
        self.pattern, self.size, self.channels = pattern, size, list(channels)
        self.value = 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_hook(self._move)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _move(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        mean = torch.zeros(output.shape[-1])
        mean[self.channels] = self.value
        return output + mean


class QueryOutliers(Mechanism):
    """One channel pair of the queries of every head carries ``size``; the keys' is zero, and stays so.

    Args:
        pattern: Names of attentions with ``q_proj``, ``k_proj`` and ``head_dim``; a pair, because RoPE turns one into the other.
        size: By step.
        channel: Within a head, below half of it.

    Source:
        Outlier channels of queries and not only of keys: Zhang et al., "SageAttention2" (arXiv 2411.10958).
    """

    def __init__(self, pattern: str, size: Size, channel: int = 1) -> None:
        self.pattern, self.size, self.channel = pattern, size, channel
        self.value = 0.0

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            self.every = attention.head_dim // 2
            key = attention.k_proj.weight
            silent = torch.arange(self.channel, key.shape[0], self.every)
            with torch.no_grad():
                key[silent] = 0.0
            keep(key, silent)
            attention.q_proj.register_forward_hook(self._put)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _put(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        bump = torch.zeros(output.shape[-1])
        bump[self.channel :: self.every] = self.value
        return output + bump
