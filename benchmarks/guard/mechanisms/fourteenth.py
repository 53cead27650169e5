"""What a user's FP8 run meets in heads, initial weights, keys and gradients that no earlier half has: made for the fourteenth half."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, Size, change_gradient, matching
from torch import Tensor, nn


class HeadsAlike(Mechanism):
    """Every head of what some linears read gains ``size`` times the mean of all heads of its token; it is taken off behind.

    The heads of a token differ from each other as before, but their differences are ever less of what they are. Each token has another
    mean, so that none is common to all tokens.

    Args:
        pattern: Names of the linears, without biases, whose inputs are ``[..., heads * head_dim]``.
        size: By step.
        heads: How many.

    Source:
        Heads that say the same, so that most may be left out: Michel et al., "Are sixteen heads really better than one?" (arXiv
        1905.10650); a part that heads share, which is worth a matrix of its own: Cordonnier et al. (arXiv 2006.16362). That the part in
        common takes the bits of what differs is known of keys: Zhang et al., "SageAttention" (arXiv 2410.02367).
    """

    def __init__(self, pattern: str, size: Size, heads: int) -> None:
        self.pattern, self.size, self.heads, self.value = pattern, size, heads, 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(self._add)
            linear.register_forward_hook(self._take_off)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _add(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if not self.value:
            return None
        heads = args[0].unflatten(-1, (self.heads, -1))
        self.bump = (self.value * heads.mean(-2, keepdim=True)).expand_as(heads).flatten(-2)
        return (args[0] + self.bump,)

    def _take_off(self, module: Any, args: Any, output: Tensor) -> Tensor | None:
        return output - F.linear(self.bump, module.weight) if self.value else None


class InitialWeightsGrow(Mechanism):
    """Weights of some linears are what they are trained to, plus what they began with, which grows to ``size``; what that adds is taken off behind.

    Of full rank, and no element, channel or direction sticks out. What was learned is ever less of a weight.

    Args:
        pattern: Names of the linears.
        size: By step, the deviation of what is added.

    Source:
        Models whose scale is large learn by changes of their weights that are ever smaller beside what the weights began with, and the
        initial model's function is taken off: Chizat et al., "On lazy training in differentiable programming" (arXiv 1812.07956).
        Changes that are small beside their weights are rounded off: Zamirai et al., "Revisiting BFloat16 training" (arXiv 2010.06192).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    @torch.no_grad()
    def install(self, model: nn.Module) -> None:
        self.began: dict[str, Tensor] = {}
        for name, linear in matching(model, self.pattern):
            self.began[name] = began = linear.weight / linear.weight.std()
            linear.register_forward_hook(
                lambda module, args, output, began=began: (
                    output - self.value * F.linear(args[0], began) if self.value else output
                )
            )

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        before, self.value = self.value, self.size(step)
        if self.value != before:
            for name, linear in matching(model, self.pattern):
                linear.weight += (self.value - before) * self.began[name]


class KeysUnread(Mechanism):
    """Queries of every head lie in a subspace, from the start on; keys gain a vector of each token orthogonal to it, of ``size``: logits stay.

    The subspace is no channel's, and the vectors differ by token and head, so that neither a channel nor a mean of the keys sticks out.

    Args:
        pattern: Names of attentions with ``q_proj``, ``k_proj`` and ``head_dim``, without RoPE.
        size: By step; of each of the vectors' elements.
        rank: How many dimensions of a head queries do not have.

    Source:
        Queries and keys that use few of their head's dimensions, more so in OPT and MPT than elsewhere: Saxena et al., "Eigen attention"
        (arXiv 2408.05646); keys' range is what quantised attention fails on: Liu et al., "KIVI" (arXiv 2402.02750).
    """

    def __init__(self, pattern: str, size: Size, rank: int) -> None:
        self.pattern, self.size, self.rank, self.value = pattern, size, rank, 0.0

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(191)
        embedding = model.get_input_embeddings()
        embedding.register_forward_pre_hook(self._look)
        for _, attention in matching(model, self.pattern):
            d, heads = attention.head_dim, attention.k_proj.out_features // attention.head_dim
            unread = torch.linalg.qr(torch.randn(d, d, generator=generator))[0][:, : self.rank]
            signals = torch.randn(embedding.num_embeddings, heads, self.rank, generator=generator)
            vectors = (signals @ unread.T * (d / self.rank) ** 0.5).flatten(1)
            reads = torch.eye(d) - unread @ unread.T
            attention.q_proj.register_forward_hook(
                lambda module, args, output, reads=reads: (
                    output.unflatten(-1, (-1, len(reads))) @ reads
                ).flatten(-2)
            )
            attention.k_proj.register_forward_hook(
                lambda module, args, output, vectors=vectors: (
                    output + self.value * vectors[self.ids].view_as(output)
                )
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.ids = args[0]


class GradientsOfLater(Mechanism):
    """The gradient of each token, behind some linears, gains ``size`` times the mean of those of the tokens after it; it is taken off again.

    A second product of the same operands, in high precision and worth nothing, gets the opposite gradient.

    Args:
        pattern: Names of the linears, whose outputs are ``[rows, length, ...]``.
        size: By step.

    Source:
        Causal attention sends the gradients of all later tokens to the ones before, whose own are lost in the sum: Barbero et al.,
        "Transformers need glasses!" (arXiv 2406.04267); gradients under FP8 need their range more than all else: Micikevicius et al.
        (arXiv 2209.05433).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_hook(self._move)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _later(self, grad: Tensor) -> Tensor:
        after = grad.flip(1).cumsum(1).flip(1) - grad
        count = torch.arange(grad.shape[1] - 1, -1, -1).clamp(min=1)[:, None]
        return self.value * after / count

    def _move(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self.value or not output.requires_grad:
            return None
        again = change_gradient(
            F.linear(args[0], module.weight, module.bias), lambda grad: -self._later(grad)
        )
        return change_gradient(output, lambda grad: grad + self._later(grad)) + (again - again.detach())
