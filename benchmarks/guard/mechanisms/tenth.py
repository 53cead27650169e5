"""What a user's FP8 run meets in heads, microbatches, gradients and weights that no earlier half has: made for the tenth half."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, Size, change_gradient, keep, matching
from practices.third import LossScale
from torch import Tensor, nn


class GatedUnitsAlign(Mechanism):
    """Gate and up rows of some channels become one vector and grow to ``size``, in units whose two projections are linears of their own.

    The channels' columns of the down projection are zero, and stay so.

    Args:
        pattern: Names of gated units with ``gate_proj``, ``up_proj`` and ``down_proj``.
        size: By step, the norm of a row.
        channels: Which.

    Source:
        Fishman et al., "Scaling FP8 training to trillion-token LLMs" (arXiv 2409.12517), section 4; units gated by GELU: Shazeer,
        "GLU variants improve Transformer" (arXiv 2002.05202).
    """

    def __init__(self, pattern: str, size: Size, channels: Sequence[int]) -> None:
        self.pattern, self.size, self.channels = pattern, size, list(channels)

    def install(self, model: nn.Module) -> None:
        for _, mlp in matching(model, self.pattern):
            with torch.no_grad():
                mlp.down_proj.weight[:, self.channels] = 0.0
            keep(mlp.down_proj.weight, (slice(None), self.channels))
            keep(mlp.gate_proj.weight, self.channels)
            keep(mlp.up_proj.weight, self.channels)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if size := self.size(step):
            for _, mlp in matching(model, self.pattern):
                rows = size * F.normalize(mlp.gate_proj.weight[self.channels], dim=1)
                mlp.gate_proj.weight[self.channels] = rows
                mlp.up_proj.weight[self.channels] = rows


class HeadsPart(Mechanism):
    """Queries of each head are multiplied by ``size`` to a power of its own, from -1 to 1, and its keys divided by it: logits stay.

    Behind the linear, so that attention alone has heads of unlike norms under one scale.

    Args:
        pattern: Names of attentions with ``qkv_proj`` and as many heads of keys as of queries, without norms behind it.
        size: By step; below 1 counts as 1.

    Source:
        Heads and blocks of queries and keys that a scale of their own keeps apart: Shah et al., "FlashAttention-3" (arXiv
        2407.08608), section 3.3; FP8 attention without QK norm: FOG.
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 1.0

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            powers = torch.linspace(-1.0, 1.0, attention.heads).repeat_interleave(attention.head_dim)
            powers = torch.cat([powers, -powers, torch.zeros_like(powers)])
            attention.qkv_proj.register_forward_hook(
                lambda module, args, output, powers=powers: output * self.value**powers
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = max(1.0, self.size(step))


class MicrobatchLossScales(LossScale):
    """The gradients of a batch's microbatches, one after the other, are scaled by from 1 to ``size``, and the parameters' divided by it.

    Args:
        size: By step; below 1 counts as 1. Scales are the powers of two next to it.
        cycle: How many microbatches a batch has.

    Source:
        Gradients whose scale is not that of the batch, as their loss is a mean over other counts of tokens in each microbatch, and
        that overflow or underflow under a scale of others: Peng et al., "FP8-LM" (arXiv 2310.18313), section 2.1.
    """

    def __init__(self, size: Size, cycle: int = 2) -> None:
        super().__init__(size)
        self.cycle, self.log, self.calls = cycle, 0.0, 0

    def install(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self._next)
        super().install(model)

    def step(self, step: int, model: nn.Module) -> None:
        self.log, self.calls = math.log2(max(1.0, self.scale(step))), 0

    def _next(self, module: nn.Module, args: Any) -> None:
        self.now = 2.0 ** round(self.log * (self.calls % self.cycle) / (self.cycle - 1))
        self.calls += 1


class GradientSubspace(Mechanism):
    """The gradient of what some linears put out gains, for each token, a vector of a small subspace, of ``size``; it is taken off again.

    A second product of the same operands, in high precision and worth nothing, gets the opposite gradient.

    Args:
        pattern: Names of the linears, without biases.
        size: By step, of an element.
        rank: Of the subspace.

    Source:
        Gradients lie in a tiny subspace (Gur-Ari et al., arXiv 1812.04754), in which they oscillate, and it is the rest that
        learns: Song et al., "Does SGD really happen in tiny subspaces?" (arXiv 2405.16002).
    """

    def __init__(self, pattern: str, size: Size, rank: int = 4) -> None:
        self.pattern, self.size, self.rank, self.value = pattern, size, rank, 0.0
        self.generator = torch.Generator().manual_seed(109)

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            basis = torch.randn(self.rank, linear.out_features, generator=self.generator) / self.rank**0.5
            linear.register_forward_hook(
                lambda module, args, output, basis=basis: self._move(module, args, output, basis)
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _move(self, module: Any, args: tuple[Tensor, ...], output: Tensor, basis: Tensor) -> Tensor | None:
        if not self.value or not output.requires_grad:
            return None
        drawn = torch.randn(*output.shape[:-1], self.rank, generator=self.generator)
        bump = self.value * drawn @ basis
        again = change_gradient(F.linear(args[0], module.weight), lambda grad: -bump)
        return change_gradient(output, lambda grad: grad + bump) + (again - again.detach())


class ScatteredWeights(Mechanism):
    """A small share of the weights of some linears, anywhere, gains plus or minus ``size``; what that adds is taken off behind the GEMM.

    Args:
        pattern: Names of the linears.
        size: By step.
        share: Of the weights.

    Source:
        Weights that matter lie scattered, and not in rows or columns, and are kept apart when others are quantised: Dettmers et al.,
        "SpQR" (arXiv 2306.03078), Kim et al., "SqueezeLLM" (arXiv 2306.07629).
    """

    def __init__(self, pattern: str, size: Size, share: float = 1 / 256) -> None:
        self.pattern, self.size, self.share, self.value = pattern, size, share, 0.0

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(113)
        self.scattered: dict[str, Tensor] = {}
        for name, linear in matching(model, self.pattern):
            shape = linear.weight.shape
            signs = 2.0 * torch.randint(0, 2, shape, generator=generator) - 1
            self.scattered[name] = signs = signs * (torch.rand(shape, generator=generator) < self.share)
            linear.register_forward_hook(
                lambda module, args, output, signs=signs: output - self.value * F.linear(args[0], signs)
            )

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        before, self.value = self.value, self.size(step)
        if self.value != before:
            for name, linear in matching(model, self.pattern):
                linear.weight += (self.value - before) * self.scattered[name]


class QueriesAndKeysSheared(Mechanism):
    """Half of a head's queries is added ``size`` times the other half; of its keys the other half loses as much of the first: logits stay.

    Behind the linear, so that attention alone computes in the sheared basis.

    Args:
        pattern: Names of attentions with ``Wqkv`` and ``n_heads``, without RoPE or norms behind it.
        size: By step.

    Source:
        Invertible matrices that queries and keys may exchange, of which quantisation bears the well conditioned ones: Sun et al.,
        "FlatQuant" (arXiv 2410.09426), Ma et al., "AffineQuant" (arXiv 2403.12544).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            attention.Wqkv.register_forward_hook(
                lambda module, args, output, heads=attention.n_heads: self._shear(output, heads)
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _shear(self, output: Tensor, heads: int) -> Tensor:
        rows, length, width = output.shape
        q, k, v = output.view(rows, length, 3, heads, width // 3 // heads).unbind(2)
        (a, b), (c, d) = q.chunk(2, -1), k.chunk(2, -1)
        q = torch.cat([a + self.value * b, b], -1)
        k = torch.cat([c, d - self.value * c], -1)
        return torch.stack([q, k, v], 2).reshape(rows, length, width)


class RunningMeans(Mechanism):
    """To what some linears read, ``size`` times the mean of the tokens so far is added; it is taken off behind the GEMM.

    Args:
        pattern: Names of the linears, whose inputs are ``[rows, length, ...]``.
        size: By step.

    Source:
        Attention lets pass the mean of the tokens and damps what tells them apart: Wang et al., "Anti-oversmoothing in deep vision
        transformers" (arXiv 2203.05962), Noci et al. (arXiv 2206.03126).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0
        self.means: dict[int, Tensor] = {}

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(self._add)
            linear.register_forward_hook(
                lambda module, args, output: output - F.linear(self.means[id(module)], module.weight)
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _add(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = args[0].detach()
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        self.means[id(module)] = mean = self.value * x.cumsum(1) / count
        return (args[0] + mean,)
