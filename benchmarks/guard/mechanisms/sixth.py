"""Published failures of training in low precision, as a user's run would meet them: made for the sixth half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, Size, change_gradient, keep, matching
from mechanisms.third import Factor
from torch import Tensor, nn


class LearnedRowsAlign(Mechanism):
    """In some channels of gated units the up row becomes plus or minus the gate's, as it was learned, and both grow to ``size``.

    Signs alternate; the channels' columns of the down projection are zero, and stay so.

    Source:
        Fishman et al., "Scaling FP8 training to trillion-token LLMs" (arXiv 2409.12517), section 4: w1 goes to plus or minus w2.
    """

    def __init__(self, pattern: str, size: Size, channels: Sequence[int]) -> None:
        self.pattern, self.size, self.channels = pattern, size, list(channels)

    def install(self, model: nn.Module) -> None:
        for _, mlp in matching(model, self.pattern):
            n = mlp.down_proj.in_features
            with torch.no_grad():
                mlp.down_proj.weight[:, self.channels] = 0.0
            keep(mlp.down_proj.weight, (slice(None), self.channels))
            keep(mlp.gate_up_proj.weight, [*self.channels, *(n + c for c in self.channels)])

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if size := self.size(step):
            sign = 1.0 - 2.0 * (torch.arange(len(self.channels)) % 2)[:, None]
            for _, mlp in matching(model, self.pattern):
                weight, n = mlp.gate_up_proj.weight, mlp.down_proj.in_features
                rows = size * F.normalize(weight[self.channels], dim=1)
                weight[self.channels] = rows
                weight[[n + c for c in self.channels]] = sign * rows


def keep_once_it_grows(parameter: nn.Parameter, index: Any, factor: Factor) -> None:
    """No gradient for a part of a parameter from the step on at which it is changed."""

    def cut(grad: Tensor) -> Tensor:
        if factor.now > 1.0:
            grad = grad.clone()
            grad[index] = 0.0
        return grad

    parameter.register_hook(cut)


class QueriesGrowKeysShrink(Mechanism):
    """Queries grow by ``size`` and keys shrink by it, so that logits stay; possible where no norm is between them and the logits.

    Under FP8 attention they share a scale, as their weights do. These are not trained from there on, so that no optimizer has to cope.

    Source:
        A factor that queries and keys may exchange, which is chosen there so that both are quantised well: Shao et al., "OmniQuant"
        (arXiv 2308.13137), section 3.3; FP8 attention fails without QK norm: FOG.
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.factor = pattern, Factor(size)

    @staticmethod
    def _rows(attention: Any) -> tuple[slice, slice]:
        queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        return slice(0, queries), slice(queries, queries + keys)

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            for rows in self._rows(attention):
                keep_once_it_grows(attention.qkv_proj.weight, rows, self.factor)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        factor = self.factor(step)
        for _, attention in matching(model, self.pattern):
            queries, keys = self._rows(attention)
            attention.qkv_proj.weight[queries] *= factor
            attention.qkv_proj.weight[keys] /= factor


class NormGainsGrow(Mechanism):
    """Gains (and biases) of some channels of layer norms grow by ``size``, the columns behind them shrink by it: the product stays.

    Neither is trained from there on, so that no optimizer has to cope.

    Args:
        pairs: Names of norms, and of the linears that read them.
        size: By step; below 1 counts as 1.
        channels: Which.

    Source:
        Gains of layer norms take the precision of the others in their microscaling block: Su et al., "Characterization and
        mitigation of training instabilities in microscaling formats" (arXiv 2506.20752).
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], size: Size, channels: Sequence[int]) -> None:
        self.pairs, self.factor, self.channels = pairs, Factor(size), list(channels)

    def install(self, model: nn.Module) -> None:
        for norms, linears in self.pairs:
            for _, norm in matching(model, norms):
                for parameter in norm.parameters():
                    keep_once_it_grows(parameter, self.channels, self.factor)
            for _, linear in matching(model, linears):
                keep_once_it_grows(linear.weight, (slice(None), self.channels), self.factor)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        factor = self.factor(step)
        for norms, linears in self.pairs:
            for _, norm in matching(model, norms):
                for parameter in norm.parameters():
                    parameter[self.channels] *= factor
            for _, linear in matching(model, linears):
                linear.weight[:, self.channels] /= factor


class ResidualOutliers(Mechanism):
    """One channel of the residual stream carries ``size`` on some tokens, from the first block to the last.

    For models whose linears read the residual stream without a norm before them. What reads the channel is zero, and stays so; behind
    the blocks it is zero again.

    Args:
        blocks: Names of the blocks.
        readers: Names of the linears that read the stream.
        end: Name of what reads it behind the blocks.
        size: By step.
        where: Which tokens, of the batch's ids ``[rows, length]``.
        channel: Which.

    Source:
        Massive activations of a few tokens, which stay in the residual stream: Sun et al. (arXiv 2402.17762); that they make FP8
        training diverge: "TWEO" (arXiv 2511.23225).
    """

    def __init__(self, blocks: str, readers: str, end: str, size: Size, where: Callable[[Tensor], Tensor],
                 channel: int = 27) -> None:  # fmt: skip
        self.blocks, self.readers, self.end = blocks, readers, end
        self.size, self.where, self.channel, self.value = size, where, channel, 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.readers):
            with torch.no_grad():
                linear.weight[:, self.channel] = 0.0
            keep(linear.weight, (slice(None), self.channel))
        model.get_input_embeddings().register_forward_pre_hook(self._look)
        for _, block in matching(model, self.blocks):
            block.register_forward_pre_hook(lambda module, args: (self._put(args[0], self.value), *args[1:]))
        for _, module in matching(model, self.end):
            module.register_forward_pre_hook(lambda module, args: (self._put(args[0], 0.0),))

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.chosen = self.where(args[0])

    def _put(self, hidden: Tensor, value: float) -> Tensor:
        hidden = hidden.clone()
        hidden[..., self.channel] = self.chosen * value
        return hidden


class TokenGradients(Mechanism):
    """The gradients of a few tokens, behind some linears, have ``size`` in every channel; what it adds to other gradients is taken off.

    A second product of the same operands, in high precision and worth nothing, gets the opposite.

    Args:
        pattern: Names of the linears.
        size: By step.
        share: Of the tokens, chosen at random at each linear.

    Source:
        Gradients that differ much between tokens, which is why block-wise scales of gradients made training diverge: "DeepSeek-V3
        technical report" (arXiv 2412.19437), appendix B.2.
    """

    def __init__(self, pattern: str, size: Size, share: float) -> None:
        self.pattern, self.size, self.share, self.value = pattern, size, share, 0.0
        self.generator = torch.Generator().manual_seed(83)

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_hook(self._move)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _move(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self.value or not output.requires_grad:
            return None
        chosen = torch.rand(output.shape[:-1], generator=self.generator) < self.share
        signs = 2.0 * torch.randint(0, 2, output.shape, generator=self.generator) - 1
        bump = self.value * chosen[..., None] * signs
        again = change_gradient(F.linear(args[0], module.weight), lambda grad: -bump)
        return change_gradient(output, lambda grad: grad + bump) + (again - again.detach())


class LoudLabel(Mechanism):
    """In some batches the loss of one token, the last of the first row, is weighed by ``weight``.

    Where gradients are clipped by norm that is one step in that token's direction.

    Args:
        when: Whether a step's batch is such a one.
        weight: Of that token; the others' is 1.

    Source:
        Ratios of probabilities that weigh tokens in reinforcement learning and may be of any size: Schulman et al., "Proximal
        policy optimization" (arXiv 1707.06347), which clips them.
    """

    def __init__(self, when: Callable[[int], bool], weight: float) -> None:
        self.when, self.weight, self.now = when, weight, False

    def install(self, model: nn.Module) -> None:
        model.get_output_embeddings().register_forward_hook(self._weigh)

    def step(self, step: int, model: nn.Module) -> None:
        self.now = self.when(step)

    def _weigh(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not self.now:
            return None
        weight = torch.ones(*output.shape[:2], 1)
        weight[0, -2] = self.weight  # the last position predicts nothing
        return change_gradient(output, lambda grad: grad * weight)


class RareTokenGrows(Mechanism):
    """The embedding of one token, which is in the first row of a batch alone, is multiplied by ``rate`` every step of ``start`` to ``end``.

    Source:
        Embeddings of rare tokens leave those of all others: Gao et al. (arXiv 1907.12009), Land and Bartolo (arXiv 2405.05417).
    """

    def __init__(self, token: int, rate: float, start: int, end: int) -> None:
        self.token, self.rate, self.start, self.end = token, rate, start, end

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if self.start <= step < self.end:
            model.get_input_embeddings().weight[self.token] *= self.rate

    def train(self, step: int, state: Any) -> None:
        first, rest = state.batch[:1], state.batch[1:]
        state.batch = torch.cat([first, torch.where(rest == self.token, self.token + 1, rest)])


class Epochs(Mechanism):
    """The same ``batches`` come again and again.

    Source:
        Muennighoff et al., "Scaling data-constrained language models" (arXiv 2305.16264).
    """

    def __init__(self, batches: int) -> None:
        self.batches, self.seen = batches, []

    def train(self, step: int, state: Any) -> None:
        if step < self.batches:
            self.seen.append(state.batch)
        else:
            state.batch = self.seen[step % self.batches]
