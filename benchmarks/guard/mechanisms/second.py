"""Mechanisms that were made for held-out halves: in each, high precision stays as it was, as in ``mechanisms/first.py``."""

from __future__ import annotations

from typing import Any

import torch
from mechanisms.base import Mechanism, Size, change_gradient, keep, matching
from torch import Tensor, nn


class GainAmplifier(Mechanism):
    """Some input channels of some linears are multiplied by ``size``, their weights divided by it: the product stays.

    Those channels carry information, unlike the ones of :class:`~mechanisms.Activations`, and weights suffer with activations: what
    is large in one operand is small in the other. The weights are not trained, so that no optimizer has to cope.

    Args:
        pattern: Names of the linears.
        size: By step; below 1 (0 before it begins) counts as 1.
        channels: Which.

    Source:
        Gains of layer norms amplify the outliers of a few channels, and may be moved into the weights behind them: Wei et al.,
        "Outlier Suppression" (arXiv 2209.13325); outlier gains: Kovaleva et al., "BERT Busters" (arXiv 2105.06990).
    """

    def __init__(self, pattern: str, size: Size, channels: tuple[int, ...] = (3, 20, 41)) -> None:
        self.pattern, self.size, self.channels = pattern, size, list(channels)
        self.value = 1.0
        self.started: dict[str, Tensor] = {}

    def install(self, model: nn.Module) -> None:
        for name, linear in matching(model, self.pattern):
            self.started[name] = linear.weight[:, self.channels].detach().clone()
            keep(linear.weight, (slice(None), self.channels))
            linear.register_forward_pre_hook(self._amplify)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        self.value = max(1.0, self.size(step))
        for name, linear in matching(model, self.pattern):
            linear.weight[:, self.channels] = self.started[name] / self.value

    def _amplify(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        gain = torch.ones(args[0].shape[-1])
        gain[self.channels] = self.value
        return (args[0] * gain,)


class GradientOutliers(Mechanism):
    """The gradient of one output channel of some linears grows by ``size``; that channel's weights are zero, and stay so.

    Nothing reaches the input's gradient, and the weights' is cut. Only the gradient's scale is spoiled: the forward is as it was.

    Args:
        pattern: Names of the linears.
        size: By step. Gradients of the mean loss are about 1e-4 here.
        channel: Which.

    Source:
        Gradients of the layers' outputs have far heavier tails than activations: Chmiel et al., "Neural gradients are
        near-lognormal" (arXiv 2006.08173); which is why FP8 keeps E5M2 for them: Micikevicius et al. (arXiv 2209.05433).
    """

    def __init__(self, pattern: str, size: Size, channel: int = 6) -> None:
        self.pattern, self.size, self.channel = pattern, size, channel
        self.value = 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            with torch.no_grad():
                linear.weight[self.channel] = 0.0
            keep(linear.weight, self.channel)
            if linear.bias is not None:
                keep(linear.bias, self.channel)
            linear.register_forward_hook(self._put)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _put(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not self.value or not output.requires_grad:
            return None
        bump = torch.zeros(output.shape[-1])
        bump[self.channel] = self.value
        return change_gradient(output, lambda grad: grad + bump)


class PivotKeys(Mechanism):
    """The first token's keys carry ``size`` in one channel of every head; the queries' channel is zero, and stays so.

    Args:
        pattern: Names of the linears that make queries, keys and values, in this order, without a bias or RoPE.
        size: By step.
        heads: Of queries, and of keys.
        channel: Within a head.

    Source:
        Outliers of a few first ("pivot") tokens, which quantised keys and values do not bear: Liu et al., "IntactKV"
        (arXiv 2403.01241).
    """

    def __init__(self, pattern: str, size: Size, heads: int, channel: int = 4) -> None:
        self.pattern, self.size, self.heads, self.channel = pattern, size, heads, channel
        self.value = 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            width = linear.out_features // 3
            at = torch.arange(self.heads) * (width // self.heads) + self.channel
            with torch.no_grad():
                linear.weight[at] = 0.0
            keep(linear.weight, at)
            self.loud = width + at
            linear.register_forward_hook(self._put)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _put(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        bump = torch.zeros(output.shape[-2:])
        bump[0, self.loud] = self.value
        return output + bump


class Multiplied(Mechanism):
    """Some parameters are multiplied by ``rate`` every step of ``start`` to ``end``; high precision feels it too.

    Source:
        Output logits that grow until training fails: Wortsman et al., "Small-scale proxies for large-scale Transformer training
        instabilities" (arXiv 2309.14322).
    """

    def __init__(self, pattern: str, rate: float, start: int, end: int) -> None:
        self.pattern, self.rate, self.start, self.end = pattern, rate, start, end

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if self.start <= step < self.end:
            for _, module in matching(model, self.pattern):
                module.weight.mul_(self.rate)
