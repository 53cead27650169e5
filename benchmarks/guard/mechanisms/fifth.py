"""What a user's runs meet, of many families, and what a careful user does: made for the fifth half.

What grows is not felt by high precision: it is taken off again behind the GEMM, meets its opposite within it, or is undone by a norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from mechanisms.base import Mechanism, Size, change_gradient, keep, matching
from mechanisms.first import Activations
from mechanisms.third import Factor
from practices.third import Adapters
from torch import Tensor, nn


class PositionMean(Mechanism):
    """Every position adds a vector of its own, of ``size`` in each channel, to what some linears read; it is taken off behind the GEMM.

    The vectors lie on a circle in a plane, once around in ``length`` positions, so that their mean over a row is zero.

    Source:
        Hidden states are a mean, a smooth low-dimensional curve of the position, and what depends on the context: Song and Zhong,
        "Uncovering hidden geometry in Transformers via disentangling position and context" (arXiv 2310.04861).
    """

    def __init__(self, pattern: str, size: Size, length: int = 32) -> None:
        self.pattern, self.size, self.length, self.value = pattern, size, length, 0.0

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(53)
        angle = 2 * math.pi * torch.arange(self.length) / self.length
        for _, linear in matching(model, self.pattern):
            plane = torch.randint(0, 2, (2, linear.in_features), generator=generator) * 2.0 - 1
            circle = torch.stack([angle.cos(), angle.sin()], 1) @ plane
            linear.register_forward_pre_hook(
                lambda module, args, circle=circle: (args[0] + self.value * circle,)
            )
            linear.register_forward_hook(
                lambda module, args, output, circle=circle: output - self.value * (circle @ module.weight.T)
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)


class PairedGradients(Mechanism):
    """Rows come in pairs of the same tokens, and the gradients of their logits move by ``size`` in opposite directions.

    All of it cancels in the gradient of every parameter, where the two rows are summed; not where each was rounded before.

    Source:
        Chosen and rejected answers begin with the same prompt, whose gradients cancel: Rafailov et al., "Direct preference
        optimization" (arXiv 2305.18290).
    """

    def __init__(self, size: Size) -> None:
        self.size, self.value = size, 0.0

    def install(self, model: nn.Module) -> None:
        model.get_output_embeddings().register_forward_hook(self._push)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def train(self, step: int, state: Any) -> None:
        state.batch = state.batch[::2].repeat_interleave(2, 0)

    def _push(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not self.value or not output.requires_grad:
            return None
        sign = 1.0 - 2.0 * (torch.arange(output.shape[0]) % 2)[:, None, None]
        push = torch.randn(output.shape[1:], generator=torch.Generator().manual_seed(59))
        return change_gradient(output, lambda grad, value=self.value: grad + value * sign * push)


class DecayedBeforeNorm(Mechanism):
    """Weights of some linears that a norm reads shrink by ``size``, and are not trained from there on: the norm takes it off again.

    Needs a norm whose epsilon is small against what comes of them. Delayed scaling scales by the largest of a history, so that they
    are flushed.

    Source:
        Weight decay on weights whose length does not matter: van Laarhoven, "L2 regularization versus batch and weight normalization"
        (arXiv 1706.05350).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.factor = pattern, Factor(size)

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.weight.register_hook(lambda grad: grad if self.factor.now == 1.0 else grad * 0.0)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        factor = self.factor(step)
        for _, linear in matching(model, self.pattern):
            linear.weight /= factor


class SplitUnits(Mechanism):
    """Units in front of some linears come in pairs that are alike; of their weights one gains ``size`` and the other loses it.

    Args:
        pattern: Names of the linears.
        size: By step.

    Source:
        A wider network of the same function has units that are copies, and only the sum of what leaves them counts: Chen et al.,
        "Net2Net" (arXiv 1511.05641).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(
                lambda module, args: (args[0][..., ::2].repeat_interleave(2, -1),)
            )

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        before, self.value = self.value, self.size(step)
        generator = torch.Generator().manual_seed(61)
        for _, linear in matching(model, self.pattern):
            shape = linear.out_features, linear.in_features // 2
            sign = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
            linear.weight[:, ::2] += (self.value - before) * sign
            linear.weight[:, 1::2] -= (self.value - before) * sign


class AttentionGradientOutliers(Mechanism):
    """The gradient of what attention puts out carries ``size`` in one channel of every head; the values' channel is zero, and stays so.

    The linears around it have the gradients they had.

    Source:
        The product of that gradient with the values is what quantised attention bears least: Zhang et al., "SageAttention3"
        (arXiv 2505.11594), which leaves it in 16 bits.
    """

    def __init__(self, pattern: str, size: Size, channel: int = 3) -> None:
        self.pattern, self.size, self.channel, self.value = pattern, size, channel, 0.0

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            d, heads, kv = attention.head_dim, attention.heads, attention.kv_heads
            values = [(heads + kv + head) * d + self.channel for head in range(kv)]
            weight = attention.qkv_proj.weight
            with torch.no_grad():
                weight[values] = 0.0
            keep(weight, values)
            clean = torch.ones(weight.shape[0])
            clean[values] = 0.0
            attention.qkv_proj.register_forward_hook(
                lambda module, args, output, clean=clean: change_gradient(output, lambda grad: grad * clean)
            )
            attention.o_proj.register_forward_pre_hook(
                lambda module, args, d=d: (change_gradient(args[0], lambda grad: self._put(grad, d)),)
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _put(self, grad: Tensor, d: int) -> Tensor:
        return grad + self.value * (torch.arange(grad.shape[-1]) % d == self.channel)


class ModalityNorms(Mechanism):
    """Tokens of one modality are multiplied by ``size`` in front of some linears, and divided behind them.

    Args:
        pattern: Names of the linears, whose inputs are ``[rows, length, ...]``.
        size: By step; below 1 counts as 1.
        of: Which tokens, of the batch's ids ``[rows, length]``.

    Source:
        Modalities that share weights compete by growing norms: "Chameleon" (arXiv 2405.09818), section 2.3.
    """

    def __init__(self, pattern: str, size: Size, of: Callable[[Tensor], Tensor]) -> None:
        self.pattern, self.size, self.of, self.value = pattern, size, of, 1.0

    def install(self, model: nn.Module) -> None:
        model.get_input_embeddings().register_forward_pre_hook(self._look)
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(lambda module, args: (args[0] * self.factor,))
            linear.register_forward_hook(lambda module, args, output: output / self.factor)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = max(1.0, self.size(step))

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.factor = torch.where(self.of(args[0]), self.value, 1.0)[..., None]


class ExpertsAlign(Mechanism):
    """Gate and up rows of one channel of some experts become one vector of ``size``; that channel of the down projection is zero, and stays so.

    Source:
        Fishman et al., "Scaling FP8 training to trillion-token LLMs" (arXiv 2409.12517), section 4, here of experts.
    """

    def __init__(self, pattern: str, size: Size, channel: int = 13) -> None:
        self.pattern, self.size, self.channel = pattern, size, channel

    def install(self, model: nn.Module) -> None:
        for _, down in matching(model, f"{self.pattern}.w2"):
            with torch.no_grad():
                down.weight[:, self.channel] = 0.0
            keep(down.weight, (slice(None), self.channel))
        for _, linear in matching(model, f"{self.pattern}.w[13]"):
            keep(linear.weight, self.channel)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if size := self.size(step):
            for _, linear in matching(model, f"{self.pattern}.w[13]"):
                v = torch.randn(linear.in_features, generator=torch.Generator().manual_seed(73))
                linear.weight[self.channel] = size * v / v.norm()


class PromptsMasked(Mechanism):
    """From ``start`` on the first ``length`` tokens of a row are not learned.

    Source:
        Ouyang et al., "Training language models to follow instructions with human feedback" (arXiv 2203.02155).
    """

    def __init__(self, start: int, length: int) -> None:
        self.start, self.length, self.now = start, length, False

    def install(self, model: nn.Module) -> None:
        model.get_output_embeddings().register_forward_hook(self._mask)

    def step(self, step: int, model: nn.Module) -> None:
        self.now = step >= self.start

    def _mask(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not self.now:
            return None
        learned = (torch.arange(output.shape[1]) >= self.length)[:, None]
        return change_gradient(output, lambda grad: grad * learned)


class LabelsSmoothed(Mechanism):
    """From ``start`` on labels are smoothed by ``share``, seen in gradients alone.

    Source:
        Szegedy et al., "Rethinking the Inception architecture" (arXiv 1512.00567), section 7.
    """

    def __init__(self, start: int, share: float) -> None:
        self.start, self.share, self.now = start, share, 0.0

    def install(self, model: nn.Module) -> None:
        model.get_output_embeddings().register_forward_hook(self._smooth)

    def step(self, step: int, model: nn.Module) -> None:
        self.now = self.share if step >= self.start else 0.0

    def _smooth(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        rows, length, words = output.shape
        term = self.now * (output.detach().softmax(-1) - 1 / words) / (rows * (length - 1))
        term[:, -1] = 0.0  # nothing follows the last token
        return change_gradient(output, lambda grad: (1 - self.now) * grad + term)


class WordDropout(Mechanism):
    """From ``start`` on embeddings of tokens are zero, each with probability ``p``.

    Source:
        Gal and Ghahramani, "A theoretically grounded application of dropout in recurrent neural networks" (arXiv 1512.05287).
    """

    def __init__(self, start: int, p: float) -> None:
        self.start, self.p, self.now = start, p, 0.0
        self.generator = torch.Generator().manual_seed(67)

    def install(self, model: nn.Module) -> None:
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: (
                output * (torch.rand(output.shape[:-1], generator=self.generator) >= self.now)[..., None]
            )
        )

    def step(self, step: int, model: nn.Module) -> None:
        self.now = self.p if step >= self.start else 0.0


class OtherBetas(Mechanism):
    """From ``start`` on Adam's moments forget at another pace."""

    def __init__(self, start: int, betas: tuple[float, float]) -> None:
        self.start, self.betas = start, betas

    def train(self, step: int, state: Any) -> None:
        if step >= self.start:
            for group in state.optimizers[0].param_groups:
                group["betas"] = self.betas


class MergedAdapters(Adapters):
    """As ``Adapters``, which every ``every`` steps are added to the weights and start again, with the optimizer.

    Source:
        Lialin et al., "ReLoRA" (arXiv 2307.05695).
    """

    def __init__(self, start: int, pattern: str, rank: int, every: int) -> None:
        super().__init__(start, pattern, rank)
        self.every, self.generator = every, torch.Generator().manual_seed(71)

    @torch.no_grad()
    def train(self, step: int, state: Any) -> None:
        if step <= self.start or (step - self.start) % self.every:
            return
        pairs = zip(self.adapters[::2], self.adapters[1::2], strict=True)
        for (_, linear), (a, b) in zip(matching(state.model, f"*{self.pattern}"), pairs, strict=True):
            linear.weight += b @ a
            a.copy_(torch.randn(a.shape, generator=self.generator) / linear.in_features**0.5)
            b.zero_()
        state.optimizers[0].state.clear()


class ActivationsBesideAdapters(Activations):
    """As ``Activations``, with adapters installed before it, whose weights for that channel are zero, and stay so, too."""

    def install(self, model: nn.Module) -> None:
        super().install(model)
        for a in model.adapters[::2]:
            with torch.no_grad():
                a[:, self.channel] = 0.0
            keep(a.requires_grad_(True), (slice(None), self.channel))
            a.requires_grad_(False)
