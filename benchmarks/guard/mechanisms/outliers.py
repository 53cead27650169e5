"""One element, channel or token that grows and takes the range of a scale from all others.

In most of these what grows meets a weight (or an activation) that is zero and is kept at zero, so that its product is zero in high
precision at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import AddedToWeights, Mechanism, Size, Sized, at, keep, matching, zero
from torch import Tensor, nn


class Activations(Sized):
    """An input channel of linears is ``size``; its weights are zero (arXiv 2402.17762, 2511.23225).

    Args:
        pattern: Names of the linears.
        size: By step.
        share: Of the tokens, chosen at random in each batch; 1 for all; ``None`` for the first of each sequence.
        channel: Which.
    """

    def __init__(self, pattern: str, size: Size, *, share: float | None = 1.0, channel: int = 7) -> None:
        super().__init__(pattern, size)
        self.share, self.channel = share, channel
        self.generator = torch.Generator().manual_seed(11)

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            zero(linear.weight, (slice(None), self.channel))
            linear.register_forward_pre_hook(self._put)

    def _put(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if not self.value:
            return None
        x = args[0].clone()
        if self.share is None:
            x[:, 0, self.channel] = self.value
        else:
            chosen = torch.rand(x.shape[:-1], generator=self.generator) < self.share
            x[..., self.channel] = torch.where(chosen, self.value, x[..., self.channel])
        return (x,)


class ActivationsBesideAdapters(Activations):
    """As ``Activations``, with adapters installed before it, whose weights for that channel are zero, and stay so, too."""

    def install(self, model: nn.Module) -> None:
        super().install(model)
        for a in model.adapters[::2]:
            zero(a.requires_grad_(True), (slice(None), self.channel))
            a.requires_grad_(False)


class SwigluAlignment(Mechanism):
    """Gate and up rows of one channel become one vector and grow, so that the channel grows as their product (arXiv 2409.12517, section 4)."""

    def __init__(self, layer: int, size: Size, channel: int = 5) -> None:
        self.layer, self.size, self.channel = layer, size, channel

    def install(self, model: nn.Module) -> None:
        mlp = dict(model.named_modules())[f"model.layers.{self.layer}.mlp"]
        up = mlp.gate_up_proj.weight
        self.rows = [self.channel, up.shape[0] // 2 + self.channel]
        v = torch.randn(up.shape[1], generator=torch.Generator().manual_seed(3))
        self.direction = v / v.norm()
        zero(mlp.down_proj.weight, (slice(None), self.channel))
        keep(up, self.rows)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if size := self.size(step):
            up = dict(model.named_modules())[f"model.layers.{self.layer}.mlp.gate_up_proj"].weight
            up[self.rows] = size * self.direction.to(up.dtype)


class SuperWeight(Sized):
    """One weight of linears grows; the input channel that it meets is zero (arXiv 2411.07191)."""

    def __init__(self, pattern: str, size: Size, channel: int = 9) -> None:
        super().__init__(pattern, size)
        self.channel = channel

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            silent = torch.ones(linear.in_features)
            silent[self.channel] = 0.0
            linear.register_forward_pre_hook(lambda module, args, silent=silent: (args[0] * silent,))
            keep(linear.weight, (slice(None), self.channel))

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if size := self.size(step):
            for _, linear in matching(model, self.pattern):
                linear.weight[0, self.channel] = size


class ScatteredWeights(AddedToWeights):
    """One weight of 256, anywhere, gains plus or minus ``size``, and it is taken off behind (arXiv 2306.03078)."""

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(113)
        self.added = {}
        for name, linear in matching(model, self.pattern):
            shape = linear.weight.shape
            signs = 2.0 * torch.randint(0, 2, shape, generator=generator) - 1
            self.added[name] = signs = signs * (torch.rand(shape, generator=generator) < 1 / 256)
            linear.register_forward_hook(
                lambda module, args, output, signs=signs: output - self.value * F.linear(args[0], signs)
            )


class KeyOutliers(Sized):
    """A pair of channels of the keys of every head, which RoPE turns into each other, carries ``size``; the queries' are zero (arXiv 2402.02750)."""

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            d, heads = attention.head_dim, attention.heads
            pair = (2, 2 + d // 2)
            zero(attention.qkv_proj.weight, [head * d + c for head in range(heads) for c in pair])
            loud = [(heads + head) * d + c for head in range(attention.kv_heads) for c in pair]
            attention.qkv_proj.register_forward_hook(
                lambda module, args, output, loud=loud: output + at(loud, self.value, output.shape[-1])
            )


class QueryOutliers(Sized):
    """A pair of channels of the queries of every head carries ``size``; the keys' are zero (arXiv 2411.10958)."""

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            pairs = slice(1, None, attention.head_dim // 2)
            zero(attention.k_proj.weight, pairs)
            attention.q_proj.register_forward_hook(
                lambda module, args, output, pairs=pairs: output + at(pairs, self.value, output.shape[-1])
            )


class AttentionSink(Sized):
    """The odds of the first key against all others grow by ``size`` (arXiv 2309.17453, 2410.10781).

    Its value is zero, and what attention puts out is multiplied by what it lost. The first key is recognised by one channel, which is
    1 in all queries and 0 in all other keys. The probabilities of all other keys become small together, beside one that is near 1.
    For attentions with ``Wqkv``, ``out_proj`` and ``n_heads``, without RoPE.
    """

    channel = 4

    def install(self, model: nn.Module) -> None:
        self.lost: dict[int, Tensor] = {}
        for _, attention in matching(model, self.pattern):
            width = attention.out_proj.in_features
            d = width // attention.n_heads
            zero(attention.Wqkv.weight, [*range(self.channel, 2 * width, d)])
            name = id(attention)
            attention.Wqkv.register_forward_hook(
                lambda module, args, output, name=name, d=d: self._sink(output, name, d)
            )
            attention.out_proj.register_forward_pre_hook(
                lambda module, args, name=name: (args[0] * self.lost[name],)
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = math.log(max(1.0, self.size(step)))

    def _sink(self, output: Tensor, name: int, d: int) -> Tensor:
        rows, length, _ = output.shape
        q, k, v = output.view(rows, length, 3, -1, d).unbind(2)
        first = torch.arange(length)[:, None] == 0
        logits = torch.einsum("bihd,bjhd->bihj", q, k) / d**0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)[:, None]
        others = logits.masked_fill(later, -1e9)[..., 1:].logsumexp(-1)
        others = torch.where(first, torch.inf, others)  # the first sees itself alone
        lost = 1 + (logits[..., 0] + self.value - others).exp()
        self.lost[name] = lost[..., None].expand(-1, -1, -1, d).reshape(rows, length, -1)
        mark = torch.arange(d) == self.channel
        k = k + self.value * d**0.5 * (mark & first[..., None])
        return torch.stack([q + mark.to(q), k, v * ~first[..., None]], 2).reshape(rows, length, -1)


class GainAmplifier(Sized):
    """Three input channels of linears are multiplied by ``size``, their weights divided by it (arXiv 2209.13325, 2105.06990).

    Those channels carry information: what is large in one operand is small in the other. The weights are not trained.
    """

    channels = (3, 20, 41)

    def install(self, model: nn.Module) -> None:
        self.started: dict[str, Tensor] = {}
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
        gain[list(self.channels)] = self.value
        return (args[0] * gain,)


class ResidualOutliers(Sized):
    """One channel of the residual stream carries ``size`` on some tokens, from the first block to the last (arXiv 2402.17762, 2511.23225).

    For models whose linears read the stream without a norm before them. What reads the channel is zero; behind the blocks it is, too.

    Args:
        blocks: Names of the blocks.
        readers: Names of the linears that read the stream.
        end: Name of what reads it behind the blocks.
        size: By step.
        where: Which tokens, of the batch's ids ``[rows, length]``.
    """

    channel = 27

    def __init__(
        self, blocks: str, readers: str, end: str, size: Size, where: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(blocks, size)
        self.readers, self.end, self.where = readers, end, where

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.readers):
            zero(linear.weight, (slice(None), self.channel))
        model.get_input_embeddings().register_forward_pre_hook(self._choose)
        for _, block in matching(model, self.pattern):
            block.register_forward_pre_hook(lambda module, args: (self._put(args[0], self.value), *args[1:]))
        for _, module in matching(model, self.end):
            module.register_forward_pre_hook(lambda module, args: (self._put(args[0], 0.0),))

    def _choose(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.chosen = self.where(args[0])

    def _put(self, hidden: Tensor, value: float) -> Tensor:
        hidden = hidden.clone()
        hidden[..., self.channel] = self.chosen * value
        return hidden


class RareTokenGrows(Mechanism):
    """The embedding of one token, which is in the first row of a batch alone, grows by ``rate`` a step (arXiv 1907.12009, 2405.05417)."""

    def __init__(self, token: int, rate: float, start: int, end: int) -> None:
        self.token, self.rate, self.start, self.end = token, rate, start, end

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if self.start <= step < self.end:
            model.get_input_embeddings().weight[self.token] *= self.rate

    def train(self, step: int, state: Any) -> None:
        first, rest = state.batch[:1], state.batch[1:]
        state.batch = torch.cat([first, torch.where(rest == self.token, self.token + 1, rest)])
