"""What a user's FP8 run meets in weights, activations, gradients and experts that no earlier half has: made for the fifteenth half."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, Size, change_gradient, matching
from torch import Tensor, nn


class SkipsMerged(Mechanism):
    """Weights of some linears gain ``size`` on their diagonal, as if a skip were merged into them; what that adds is taken off behind.

    Every row and every column has one large element, so that none of them sticks out, and what tokens pass on unchanged is ever more
    of each output.

    Args:
        pattern: Names of the linears, of weights ``[out, in]``; the diagonal ends with the shorter side.
        size: By step.

    Source:
        Skips merged into the weights beside them, which then have a dominant diagonal that 8 bits do not bear: Chu et al., "Make RepVGG
        greater again: a quantization-aware approach" (arXiv 2212.01593), of networks of Ding et al. (arXiv 2101.03697).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_hook(self._take_off)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        before, self.value = self.value, self.size(step)
        if self.value != before:
            for _, linear in matching(model, self.pattern):
                linear.weight.diagonal().add_(self.value - before)

    def _take_off(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self.value:
            return None
        wide = output.shape[-1] - args[0].shape[-1]
        return output - self.value * F.pad(args[0], (0, wide))  # a negative pad cuts


class TailsGrow(Mechanism):
    """What some linears read gains ``size`` times its cube, in units of its token's RMS; it is taken off behind.

    Signs and the order of elements stay, and no channel or token is chosen: all tails are heavier.

    Args:
        pattern: Names of the linears, without biases.
        size: By step.

    Source:
        The kurtosis of activations grows as training goes on, before outliers are seen: He et al., "Understanding and minimising
        outlier features in neural network training" (arXiv 2405.19279); that tails are what quantisation fails on: Chmiel et al., "Robust
        quantization: one model to rule them all" (arXiv 2002.07686).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(self._add)
            linear.register_forward_hook(self._take_off)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _add(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if not self.value:
            return None
        x = args[0].detach()
        self.bump = self.value * x**3 / x.square().mean(-1, keepdim=True).clamp(min=1e-12)
        return (args[0] + self.bump,)

    def _take_off(self, module: Any, args: Any, output: Tensor) -> Tensor | None:
        return output - F.linear(self.bump, module.weight) if self.value else None


class OutputGradientsUnread(Mechanism):
    """Values of every head lie in a subspace, from the start on; gradients of what attention puts out gain a vector of each token orthogonal to it.

    Gradients of probabilities are the same, as values are zero there, and those of values lose what they gained. ``size`` is in units of
    the gradients' RMS.

    Args:
        pattern: Names of attentions with ``qkv_proj``, ``o_proj``, ``heads``, ``kv_heads`` and ``head_dim``.
        size: By step; of each of the vectors' elements.
        rank: How many dimensions of a head values do not have.

    Source:
        The product of these gradients with the values is what quantised attention bears least, as its errors add up along the row:
        Zhang et al., "SageAttention3" (arXiv 2505.11594). Values of low rank: Saxena et al., "Eigen attention" (arXiv 2408.05646).
    """

    def __init__(self, pattern: str, size: Size, rank: int) -> None:
        self.pattern, self.size, self.rank, self.value = pattern, size, rank, 0.0

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(211)
        embedding = model.get_input_embeddings()
        embedding.register_forward_pre_hook(self._look)
        for _, attention in matching(model, self.pattern):
            d, heads, kv = attention.head_dim, attention.heads, attention.kv_heads
            unread = torch.linalg.qr(torch.randn(d, d, generator=generator))[0][:, : self.rank]
            signals = torch.randn(embedding.num_embeddings, heads, self.rank, generator=generator)
            vectors = (signals @ unread.T * (d / self.rank) ** 0.5).flatten(1)
            reads = torch.eye(d) - unread @ unread.T
            attention.qkv_proj.register_forward_hook(functools.partial(self._project, kv * d, reads))
            attention.o_proj.register_forward_pre_hook(
                lambda module, args, vectors=vectors: (
                    change_gradient(args[0], functools.partial(self._put, vectors[self.ids])),
                )
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.ids = args[0]

    def _project(self, width: int, reads: Tensor, module: Any, args: Any, output: Tensor) -> Tensor:
        values = (output[..., -width:].unflatten(-1, (-1, len(reads))) @ reads).flatten(-2)
        return torch.cat([output[..., :-width], values], dim=-1)

    def _put(self, vectors: Tensor, grad: Tensor) -> Tensor:
        return grad + self.value * grad.square().mean().sqrt() * vectors.view_as(grad)


class ExpertCentroids(Mechanism):
    """What an expert reads gains ``size`` times the direction of its row of the router; it is taken off behind.

    Routers see what they saw. Each expert has another direction, and its tokens are ever closer to it.

    Args:
        pattern: Names of mixtures with ``gate`` and ``experts``, whose ``w1`` and ``w3`` have no biases.
        size: By step; the RMS of what is added.

    Source:
        Routing draws tokens to the centroids of their experts, so that representations collapse: Chi et al., "On the representation
        collapse of sparse mixture of experts" (arXiv 2204.09179).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        for _, mixture in matching(model, self.pattern):
            for i, expert in enumerate(mixture.experts):
                for linear in (expert.w1, expert.w3):
                    linear.register_forward_pre_hook(functools.partial(self._add, mixture, i))
                    linear.register_forward_hook(functools.partial(self._take_off, mixture, i))

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _bump(self, mixture: Any, i: int) -> Tensor:
        row = mixture.gate.weight[i].detach()
        return self.value * row / row.square().mean().sqrt()

    def _add(self, mixture: Any, i: int, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        return (args[0] + self._bump(mixture, i),) if self.value else None

    def _take_off(self, mixture: Any, i: int, module: Any, args: Any, output: Tensor) -> Tensor | None:
        return output - F.linear(self._bump(mixture, i), module.weight) if self.value else None
