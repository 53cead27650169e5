"""What a user's FP8 run meets in gradients of classes, values, steps that overshoot and outputs that no earlier half has: made for the thirteenth half."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, Size, change_gradient, matching
from mechanisms.sixth import NormGainsGrow
from torch import Tensor, nn


class ClassGradients(Mechanism):
    """The gradients of all tokens that the same token follows gain one vector, of ``size`` in each channel; what it adds to others is taken off.

    A second product of the same operands, in high precision and worth nothing, gets the opposite gradient.

    Args:
        pattern: Names of the linears, which see all tokens of a batch in their order.
        size: By step.

    Source:
        Gradients of a language model are those of its classes, which are most unlike in frequency, and each has a direction of its own:
        Kunstner et al., "Heavy-tailed class imbalance and why Adam outperforms gradient descent on language models" (arXiv 2402.19449);
        tokens of a class have one and the same gradient in the end: Papyan et al. (arXiv 2008.08186).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(163)
        embedding = model.get_input_embeddings()
        embedding.register_forward_pre_hook(self._look)
        for _, linear in matching(model, self.pattern):
            means = torch.randn(embedding.num_embeddings, linear.out_features, generator=generator)
            linear.register_forward_hook(
                lambda module, args, output, means=means: self._move(module, args, output, means)
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.follows = args[0].roll(-1, dims=1)

    def _move(self, module: Any, args: tuple[Tensor, ...], output: Tensor, means: Tensor) -> Tensor | None:
        if not self.value or not output.requires_grad:
            return None
        bump = self.value * means[self.follows].view_as(output)
        again = change_gradient(F.linear(args[0], module.weight, module.bias), lambda grad: -bump)
        return change_gradient(output, lambda grad: grad + bump) + (again - again.detach())


class ValuesStretched(Mechanism):
    """Values of every head are stretched by up to ``size`` along random directions, and what attention puts out is shrunk along them again.

    Directions are orthogonal and none is a channel's. Probabilities mix tokens and no channels, so that the function stays.

    Args:
        pattern: Names of attentions with ``qkv_proj`` and ``o_proj``.
        size: By step; below 1 counts as 1. Factors are its powers between 0 and 1.

    Source:
        Only the product of a head's values and its output projection counts, and under weight decay its rank falls: Kobayashi et al.,
        "Weight decay induces low-rank attention layers" (arXiv 2410.23819); the basis between the two, which may be any one, is
        chosen there so that values are quantised well: Liu et al., "SpinQuant" (arXiv 2405.16406), section 3.
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 1.0

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(167)
        for _, attention in matching(model, self.pattern):
            d = attention.head_dim
            basis = torch.linalg.qr(torch.randn(d, d, generator=generator))[0]
            first = (attention.heads + attention.kv_heads) * d
            attention.qkv_proj.register_forward_hook(
                lambda module, args, output, basis=basis, first=first: torch.cat(
                    [output[..., :first], self._stretch(output[..., first:], basis, 1)], -1
                )
            )
            attention.o_proj.register_forward_pre_hook(
                lambda module, args, basis=basis: (self._stretch(args[0], basis, -1),)
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = max(1.0, self.size(step))

    def _stretch(self, x: Tensor, basis: Tensor, sign: int) -> Tensor:
        factors = self.value ** (sign * torch.linspace(0.0, 1.0, len(basis)))
        return (x.unflatten(-1, (-1, len(basis))) @ (basis * factors @ basis.T)).flatten(-2)


class WeightsOscillate(Mechanism):
    """Weights of some linears swing by ``size`` along a few directions, to the other side in every step; what that adds is taken off behind.

    Args:
        pattern: Names of the linears.
        size: By step; of each of the weights' elements.
        rank: How many directions.

    Source:
        Steps that overshoot along the few sharpest directions, each back over the one before, by ever more: Cohen et al., "Gradient
        descent on neural networks typically occurs at the edge of stability" (arXiv 2103.00065); the same of Adam: Cohen et al.
        (arXiv 2207.14484).
    """

    def __init__(self, pattern: str, size: Size, rank: int = 4) -> None:
        self.pattern, self.size, self.rank, self.value = pattern, size, rank, 0.0

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(173)
        self.swings: dict[str, Tensor] = {}
        for name, linear in matching(model, self.pattern):
            left = torch.randn(linear.out_features, self.rank, generator=generator)
            right = torch.randn(self.rank, linear.in_features, generator=generator)
            self.swings[name] = swing = self.rank**-0.5 * left @ right
            linear.register_forward_hook(
                lambda module, args, output, swing=swing: (
                    output - self.value * F.linear(args[0], swing) if self.value else output
                )
            )

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        before, self.value = self.value, (-1.0) ** step * self.size(step)
        if self.value != before:
            for name, linear in matching(model, self.pattern):
                linear.weight += (self.value - before) * self.swings[name]


class OutputsStretched(Mechanism):
    """What some linears put out is stretched by up to ``size`` along random directions, by their weights, and shrunk along them again behind.

    Gradients are shrunk where outputs are stretched. Directions are orthogonal and none is a channel's. Weights are trained as if nothing
    had happened.

    Args:
        pattern: Names of the linears, without biases.
        size: By step; below 1 counts as 1. Factors are its powers between -1/2 and 1/2.

    Source:
        Gradients of outputs whose covariance gets ever worse conditioned, in directions that are no channels, which is what
        preconditioners by Kronecker factors are for: Gupta et al., "Shampoo" (arXiv 1802.09568), Martens and Grosse, "K-FAC" (arXiv
        1503.05671); gradients within few directions: Gur-Ari et al. (arXiv 1812.04754).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 1.0
        self.bases: dict[str, Tensor] = {}
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(179)
        for name, linear in matching(model, self.pattern):
            n = linear.out_features
            self.bases[name] = torch.linalg.qr(torch.randn(n, n, generator=generator))[0]
            linear.register_forward_hook(
                lambda module, args, output, name=name: output @ self._stretch(name, -1)
            )
            linear.weight.register_hook(lambda grad, name=name: self._stretch(name, 1) @ grad)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        self.value = max(1.0, self.size(step))
        if self.value == 1.0 and not self.weights:
            return
        for name, linear in matching(model, self.pattern):
            plain, stretched = self.weights.get(name, (linear.weight, linear.weight))
            plain = plain + (linear.weight - stretched)
            linear.weight.copy_(self._stretch(name, 1) @ plain)
            self.weights[name] = plain, linear.weight.clone()

    def _stretch(self, name: str, sign: int) -> Tensor:
        basis = self.bases[name]
        factors = self.value ** (sign * torch.linspace(-0.5, 0.5, len(basis)))
        return basis * factors @ basis.T


class NormGainsGrowWithoutMomentum(NormGainsGrow):
    """As ``NormGainsGrow``, and what grows or shrinks has no momentum left, which would move columns that shrink faster than it fades.

    Source:
        As there: Su et al. (arXiv 2506.20752).
    """

    def train(self, step: int, state: Any) -> None:
        if self.factor.now == 1.0:
            return
        model = state.model.model
        for norms, linears in self.pairs:
            parameters = [p for _, norm in matching(model, norms) for p in norm.parameters()]
            for parameter in [*parameters, *(linear.weight for _, linear in matching(model, linears))]:
                moments = state.optimizers[0].state.get(parameter, {})
                if "exp_avg" in moments:
                    moments["exp_avg"][..., self.channels] = 0.0
