"""What all tokens share grows, and their differences fall below the last bit, under any recipe; and tokens of unlike norms.

High precision has bits to spare: what is added is taken off again behind the GEMM, by a norm or by softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import AddedToGradients, AddedToWeights, Size, Sized, at, matching
from torch import Tensor, nn


class ActivationMean(Sized):
    """All that linears read moves by ``size`` in every channel (arXiv 2304.09145, 1910.07467)."""

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(lambda module, args: (args[0] + self.value,))
            linear.register_forward_hook(
                lambda module, args, output: output - self.value * module.weight.sum(1)
            )


class GradientMean(AddedToGradients):
    """The gradient of all that linears put out moves by ``size`` (arXiv 2004.01461)."""

    def bump(self, output: Tensor) -> Tensor:
        return torch.full_like(output, self.value)


class RankOne(AddedToWeights):
    """Weights of linears gain ``size`` times the product of two vectors of signs: one singular value grows (arXiv 2303.06296)."""

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(23)
        self.added = {}
        for name, linear in matching(model, self.pattern):
            left, right = (
                2.0 * torch.randint(0, 2, (n,), generator=generator) - 1 for n in linear.weight.shape
            )
            self.added[name] = torch.outer(left, right)
            linear.register_forward_hook(
                lambda module, args, output, left=left, right=right: (
                    output - self.value * (args[0] @ right)[..., None] * left
                )
            )


class CommonOutputs(AddedToWeights):
    """Rows of linears that write into the residual stream all gain one vector of ``size`` (arXiv 2409.12951, 2305.02582, 2401.15024).

    Layer norms, through which alone the model must read its stream, take off what channels share; no hook takes anything off.
    Gradients in front of a layer norm sum to zero over channels, so that what is added gives none to what the linears read.
    """

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(149)
        self.added = {
            name: 2.0 * torch.randint(0, 2, (linear.in_features,), generator=generator) - 1
            for name, linear in matching(model, self.pattern)
        }


class KeyMean(Sized):
    """All keys of a head move by one vector of ``size``: softmax does not see what all logits of a query share (arXiv 2410.02367)."""

    def __init__(self, pattern: str, size: Size, channels: Sequence[int]) -> None:
        super().__init__(pattern, size)
        self.channels = list(channels)

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_hook(
                lambda module, args, output: output + at(self.channels, self.value, output.shape[-1])
            )


class RunningMeans(Sized):
    """What linears read gains ``size`` times the mean of the tokens so far (arXiv 2203.05962, 2206.03126)."""

    def install(self, model: nn.Module) -> None:
        self.means: dict[int, Tensor] = {}
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(self._add)
            linear.register_forward_hook(
                lambda module, args, output: output - F.linear(self.means[id(module)], module.weight)
            )

    def _add(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = args[0].detach()
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        self.means[id(module)] = mean = self.value * x.cumsum(1) / count
        return (args[0] + mean,)


class Spread(Sized):
    """Tokens are multiplied by 1 to ``size`` in front of linears (even in the logarithm), and divided behind them (arXiv 2206.01861).

    Args:
        pattern: Names of the linears.
        size: By step; below 1 counts as 1.
        cycle: All tokens of a microbatch are alike, and so many microbatches follow each other, from the least to the largest.
    """

    def __init__(self, pattern: str, size: Size, *, cycle: int | None = None) -> None:
        super().__init__(pattern, size)
        self.cycle = cycle
        self.calls: dict[int, int] = {}
        self.generator = torch.Generator().manual_seed(29)
        self.factors: dict[int, Tensor] = {}

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(self._multiply)
            linear.register_forward_hook(lambda module, args, output: output / self.factors[id(module)])

    def step(self, step: int, model: nn.Module) -> None:
        self.value = max(1.0, self.size(step))

    def _multiply(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        shape = args[0].shape[:-1]
        if self.cycle is not None:
            self.calls[id(module)] = calls = self.calls.get(id(module), -1) + 1
            part = torch.full(shape, calls % self.cycle / (self.cycle - 1))
        else:
            part = torch.rand(shape, generator=self.generator)
        self.factors[id(module)] = factor = (self.value**part)[..., None]
        return (args[0] * factor,)


class ModalityNorms(Sized):
    """Tokens of one modality are multiplied by ``size`` in front of linears, and divided behind (arXiv 2405.09818, section 2.3).

    ``of`` says which tokens, of the batch's ids.
    """

    def __init__(self, pattern: str, size: Size, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__(pattern, size)
        self.of = of

    def install(self, model: nn.Module) -> None:
        model.get_input_embeddings().register_forward_pre_hook(self._choose)
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(lambda module, args: (args[0] * self.factor,))
            linear.register_forward_hook(lambda module, args, output: output / self.factor)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = max(1.0, self.size(step))

    def _choose(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.factor = torch.where(self.of(args[0]), self.value, 1.0)[..., None]
