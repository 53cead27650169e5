"""What a user's FP8 run meets in queries, blocks, gradients and bases that no earlier half has: made for the eleventh half."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, Size, change_gradient, matching
from torch import Tensor, nn

from foundry_fp8.layers.linear import FP8Linear


class QueryKeyChannelsExchange(Mechanism):
    """Channels of queries are multiplied by ``size`` to a power of their own, from -1 to 1, and the keys' divided by it: logits stay.

    Behind the linear, and with one power for the two channels that RoPE turns into one another, so that attention alone computes so.

    Args:
        pattern: Names of attentions with ``qkv_proj``, without norms behind it.
        size: By step; below 1 counts as 1.

    Source:
        A factor of each channel that queries and keys may exchange, by which outlier channels of keys are taken off: Lin et al.,
        "QServe" (arXiv 2405.04532), section 4.2, SmoothAttention.
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 1.0

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            generator = torch.Generator().manual_seed(127)
            half = attention.head_dim // 2
            powers = torch.linspace(-1.0, 1.0, half)[torch.randperm(half, generator=generator)].repeat(2)
            values = torch.zeros(attention.kv_heads * attention.head_dim)
            powers = torch.cat([powers.repeat(attention.heads), -powers.repeat(attention.kv_heads), values])
            attention.qkv_proj.register_forward_hook(
                lambda module, args, output, powers=powers: output * self.value**powers
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = max(1.0, self.size(step))


class StretchedBasis(Mechanism):
    """What some linears read is stretched by up to ``size`` along random directions, and their weights are shrunk along them: the product stays.

    Directions are orthogonal and none is a channel's. Weights are trained as if nothing had happened, as in
    :class:`~seventh_mechanisms.ChannelsExchange`.

    Args:
        pattern: Names of the linears.
        size: By step; below 1 counts as 1. Factors are its powers between 0 and 1.

    Source:
        Representations whose variance gathers in a few directions: Jing et al., "Understanding dimensional collapse" (arXiv
        2110.09348), Godey et al., "Anisotropy is inherent to self-attention in transformers" (arXiv 2401.12143).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 1.0
        self.bases: dict[str, Tensor] = {}
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(131)
        for name, linear in matching(model, self.pattern):
            n = linear.in_features
            self.bases[name] = torch.linalg.qr(torch.randn(n, n, generator=generator))[0]
            linear.register_forward_pre_hook(
                lambda module, args, name=name: (args[0] @ self._stretch(name, 1),)
            )
            linear.weight.register_hook(lambda grad, name=name: grad @ self._stretch(name, -1))

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        self.value = max(1.0, self.size(step))
        if self.value == 1.0 and not self.weights:
            return
        for name, linear in matching(model, self.pattern):
            plain, scaled = self.weights.get(name, (linear.weight, linear.weight))
            plain = plain + (linear.weight - scaled)
            linear.weight.copy_(plain @ self._stretch(name, -1))
            self.weights[name] = plain, linear.weight.clone()

    def _stretch(self, name: str, sign: int) -> Tensor:
        basis = self.bases[name]
        factors = self.value ** (sign * torch.linspace(0.0, 1.0, len(basis)))
        return basis * factors @ basis.T


class SharedAmax(Mechanism):
    """From ``start`` on the largest of the latest amaxes of a block's linears counts in the histories of all of them.

    Args:
        pattern: Names of the linears, in blocks ``layers.N``.
        start: The step.
        operands: Whose amaxes.

    Source:
        Parameters of a block that are one flat tensor, which has one amax: Zhao et al., "PyTorch FSDP" (arXiv 2304.11277); one scale
        that is agreed upon for tensors of several owners: Peng et al., "FP8-LM" (arXiv 2310.18313).
    """

    def __init__(self, pattern: str, start: int, operands: tuple[str, ...] = ("w",)) -> None:
        self.pattern, self.start, self.operands = pattern, start, operands

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step < self.start:
            return
        blocks: dict[str, list[Any]] = {}
        for name, linear in matching(model, self.pattern):
            if isinstance(linear, FP8Linear) and linear.slots:
                blocks.setdefault(re.search(r"layers\.\d+", name)[0], []).append(linear)  # type: ignore[index]
        for linears in blocks.values():
            for operand in self.operands:
                slots = [linear.slots[operand] for linear in linears]
                # The batch before is the newest that has ended, or in a loop without Composer still the running one.
                largest = torch.stack([slot.amax_history[[0, -1]].max() for slot in slots]).max()
                for slot in slots:
                    slot.record(largest)


class ScatteredGradients(Mechanism):
    """A small share of the elements of the gradients of what some linears put out, other ones in each step, gains ``size`` or loses it.

    A second product of the same operands, in high precision and worth nothing, gets the opposite gradient.

    Args:
        pattern: Names of the linears, without biases.
        size: By step.
        share: Of the elements.

    Source:
        Noise of gradients whose tails are heavy, in single elements: Simsekli et al. (arXiv 1901.06053), Zhang et al., "Why are
        adaptive methods good for attention models?" (arXiv 1912.03194).
    """

    def __init__(self, pattern: str, size: Size, share: float = 1 / 256) -> None:
        self.pattern, self.size, self.share, self.value = pattern, size, share, 0.0
        self.generator = torch.Generator().manual_seed(137)

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_hook(self._scatter)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _scatter(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self.value or not output.requires_grad:
            return None
        signs = 2.0 * torch.randint(0, 2, output.shape, generator=self.generator) - 1
        bump = self.value * signs * (torch.rand(output.shape, generator=self.generator) < self.share)
        again = change_gradient(F.linear(args[0], module.weight), lambda grad: -bump)
        return change_gradient(output, lambda grad: grad + bump) + (again - again.detach())


class TokenMeans(Mechanism):
    """Every token of the vocabulary adds a vector of its own, of ``size`` in each channel, to what some linears read; it is taken off behind.

    Args:
        pattern: Names of the linears, whose inputs are ``[rows, length, ...]``.
        size: By step.

    Source:
        Representations in which the token itself outweighs its context: Ethayarajh, "How contextual are contextualized word
        representations?" (arXiv 1909.00512), Gao et al. (arXiv 1907.12009).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(139)
        embedding = model.get_input_embeddings()
        embedding.register_forward_pre_hook(self._look)
        for _, linear in matching(model, self.pattern):
            means = torch.randn(embedding.num_embeddings, linear.in_features, generator=generator)
            linear.register_forward_pre_hook(
                lambda module, args, means=means: (args[0] + self.value * means[self.ids],)
            )
            linear.register_forward_hook(
                lambda module, args, output, means=means: (
                    output - self.value * (means @ module.weight.T)[self.ids]
                )
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.ids = args[0]
