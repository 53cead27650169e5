"""What a user's FP8 run meets in directions that nothing reads, in shards and in single elements, and that no earlier half has: made for the twelfth half."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, Size, matching
from mechanisms.seventh import ChannelsExchange
from torch import Tensor, nn

from foundry_fp8.layers.linear import FP8Linear


class CommonOutputs(Mechanism):
    """Rows of some linears that write into the residual stream all gain one vector of ``size``: layer norms take off what channels share.

    Nothing is taken off by a hook, and weights are trained as ever. Gradients in front of a layer norm sum to zero over channels, so
    that what is added to the weights gives none to what the linears read.

    Args:
        pattern: Names of the linears, in a model that reads its residual stream through layer norms alone, which subtract means.
        size: By step.

    Source:
        The direction of ones, which no layer norm lets pass, so that nothing holds what is written along it: Gupta et al., "Geometric
        interpretation of layer normalization" (arXiv 2409.12951), Brody et al. (arXiv 2305.02582); Ashkboos et al., "SliceGPT" (arXiv
        2401.15024), section 3.2, take it off all weights.
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(149)
        self.common: dict[str, Tensor] = {}
        for name, linear in matching(model, self.pattern):
            self.common[name] = 2.0 * torch.randint(0, 2, (linear.in_features,), generator=generator) - 1

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        before, self.value = self.value, self.size(step)
        if self.value != before:
            for name, linear in matching(model, self.pattern):
                linear.weight += (self.value - before) * self.common[name]


class NullSpaceGrows(Mechanism):
    """What some linears read lies in a subspace, from the start on; their weights grow by ``size`` in all that is orthogonal to it.

    All weights grow alike, and none sticks out. The product is that of the subspace alone.

    Args:
        pattern: Names of the linears.
        size: By step, a weight's deviation.
        share: Of the dimensions, which no input has.

    Source:
        Updates in the null space of what a layer reads, which leave its outputs as they were at any size: Wang et al., "Training
        networks in null space of feature covariance for continual learning" (arXiv 2103.07113), Fang et al., "AlphaEdit" (arXiv
        2410.02355).
    """

    def __init__(self, pattern: str, size: Size, share: float = 0.25) -> None:
        self.pattern, self.size, self.share, self.value = pattern, size, share, 0.0

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(151)
        self.unread: dict[str, Tensor] = {}
        for name, linear in matching(model, self.pattern):
            n = linear.in_features
            null = torch.linalg.qr(torch.randn(n, n, generator=generator))[0][:, : int(n * self.share)]
            grown = torch.randn(linear.out_features, null.shape[1], generator=generator)
            self.unread[name] = self.share**-0.5 * (grown @ null.T)
            linear.register_forward_pre_hook(
                lambda module, args, null=null: (args[0] - args[0] @ null @ null.T,)
            )

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        before, self.value = self.value, self.size(step)
        if self.value != before:
            for name, linear in matching(model, self.pattern):
                linear.weight += (self.value - before) * self.unread[name]


class AmaxOfShard(ChannelsExchange):
    """The second half of the channels of what some linears read grows by ``size``, their weights shrink by it, and amaxes are the first half's.

    Args:
        pattern: Names of the linears.
        size: By step; below 1 counts as 1.

    Source:
        Activations that are split between the ranks of a tensor-parallel group, whose amaxes are to be reduced over it, and are not:
        Transformer Engine's ``reduce_amax``, ``fp8_group``; Peng et al., "FP8-LM" (arXiv 2310.18313), section 2.3.
    """

    def install(self, model: nn.Module) -> None:
        super().install(model)
        for name, linear in matching(model, self.pattern):
            self.powers[name] = (torch.arange(linear.in_features) >= linear.in_features // 2).float()
            linear.register_forward_hook(self._see)

    @torch.no_grad()
    def _see(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        if self.weights and isinstance(module, FP8Linear) and module.slots and module.runs_fp8:
            module.slots["x"].amax.fill_(float(args[0][..., : module.in_features // 2].abs().max()))


class ScatteredActivations(Mechanism):
    """A small share of the elements of what some linears read, other ones in each step, gains ``size`` or loses it; it is taken off behind.

    Args:
        pattern: Names of the linears, without biases.
        size: By step.
        share: Of the elements.

    Source:
        Outliers of gated units that come and go, in no channel and no token of their own, for which blocks of activations fall back to
        higher precision: Zhang et al., "Accurate INT8 training through dynamic block-level fallback" (arXiv 2503.08040).
    """

    def __init__(self, pattern: str, size: Size, share: float = 1 / 256) -> None:
        self.pattern, self.size, self.share, self.value = pattern, size, share, 0.0
        self.generator = torch.Generator().manual_seed(157)
        self.bumps: dict[int, Tensor] = {}

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(self._add)
            linear.register_forward_hook(
                lambda module, args, output: output - F.linear(self.bumps[id(module)], module.weight)
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _add(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        shape = args[0].shape
        signs = 2.0 * torch.randint(0, 2, shape, generator=self.generator) - 1
        chosen = torch.rand(shape, generator=self.generator) < self.share
        self.bumps[id(module)] = bump = self.value * signs * chosen
        return (args[0] + bump,)
