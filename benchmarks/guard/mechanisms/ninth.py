"""What a user's FP8 run meets in padding, attention, gains and units that no earlier half has: made for the ninth half."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from mechanisms.base import Mechanism, Size, keep, matching
from mechanisms.sixth import keep_once_it_grows
from mechanisms.third import Factor
from torch import Tensor, nn


class PaddingGrows(Mechanism):
    """Rows end with padding, of which nothing is learned and which no token before it sees; what some linears read there grows by ``size``.

    The loss at the padding is zero, whatever is computed there.

    Args:
        pattern: Names of the linears, whose inputs are ``[rows, length, ...]``.
        size: By step; below 1 counts as 1.
        length: Of the padding, which ``train`` adds to every row.

    Source:
        An amax is taken of all rows of a tensor, padding among them, which Transformer Engine adds for FP8 (its ``Fp8Padding``); tokens
        that carry nothing and whose norms leave the others': Darcet et al. (arXiv 2309.16588), Sun et al. (arXiv 2402.17762).
    """

    def __init__(self, pattern: str, size: Size, length: int = 8) -> None:
        self.pattern, self.size, self.length, self.value = pattern, size, length, 1.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(self._multiply)
        model.get_output_embeddings().register_forward_hook(self._known)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = max(1.0, self.size(step))

    def train(self, step: int, state: Any) -> None:
        state.batch = nn.functional.pad(state.batch, (0, self.length))

    def _multiply(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        factor = torch.ones(args[0].shape[1], 1)
        factor[-self.length :] = self.value
        return (args[0] * factor,)

    def _known(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # The last token of the text predicts the first of the padding, which is not learned either.
        text = output.shape[1] - self.length - 1
        known = torch.zeros_like(output[:, text:])
        known[..., 0] = 30.0
        return torch.cat([output[:, :text], known], 1)


class AttentionSink(Mechanism):
    """The odds of the first key against all others grow by ``size``; its value is zero, and what attention puts out is multiplied by what it lost.

    The first key is recognised by one channel, which is 1 in all queries and 0 in all other keys; it carries no information. The
    probabilities of all other keys become small together, beside one that is near 1.

    Args:
        pattern: Names of attentions with ``Wqkv``, ``out_proj`` and ``n_heads``, without RoPE.
        size: By step; below 1 counts as 1.
        channel: Within a head.

    Source:
        Attention that goes to the first token, whose value is near zero: Xiao et al., "Efficient streaming language models with
        attention sinks" (arXiv 2309.17453), Gu et al., "When attention sink emerges in language models" (arXiv 2410.10781).
    """

    def __init__(self, pattern: str, size: Size, channel: int = 4) -> None:
        self.pattern, self.size, self.channel, self.log = pattern, size, channel, 0.0
        self.lost: dict[int, Tensor] = {}

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            width = attention.out_proj.in_features
            d = width // attention.n_heads
            silent = [*range(self.channel, 2 * width, d)]
            with torch.no_grad():
                attention.Wqkv.weight[silent] = 0.0
            keep(attention.Wqkv.weight, silent)
            name = id(attention)
            attention.Wqkv.register_forward_hook(
                lambda module, args, output, name=name, d=d: self._sink(output, name, d)
            )
            attention.out_proj.register_forward_pre_hook(
                lambda module, args, name=name: (args[0] * self.lost[name],)
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.log = math.log(max(1.0, self.size(step)))

    def _sink(self, output: Tensor, name: int, d: int) -> Tensor:
        rows, length, _ = output.shape
        q, k, v = output.view(rows, length, 3, -1, d).unbind(2)
        first = torch.arange(length)[:, None] == 0
        logits = torch.einsum("bihd,bjhd->bihj", q, k) / d**0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)[:, None]
        others = logits.masked_fill(later, -1e9)[..., 1:].logsumexp(-1)
        others = torch.where(first, torch.inf, others)  # the first sees itself alone
        lost = 1 + (logits[..., 0] + self.log - others).exp()
        self.lost[name] = lost[..., None].expand(-1, -1, -1, d).reshape(rows, length, -1)
        mark = torch.arange(d) == self.channel
        k = k + self.log * d**0.5 * (mark & first[..., None])
        return torch.stack([q + mark.to(q), k, v * ~first[..., None]], 2).reshape(rows, length, -1)


class QueryKeyGainsExchange(Mechanism):
    """Gains of queries in some pairs of channels grow by ``size``, those of keys shrink by it: logits stay.

    Neither is trained from there on, so that no optimizer has to cope.

    Args:
        pattern: Names of attentions with ``q_norm`` and ``k_norm``, over a head.
        size: By step; below 1 counts as 1.
        pairs: Which of the pairs that RoPE turns.

    Source:
        Massive values of a few low-frequency channels of queries and keys, and not of values: Jin et al., "Massive values in
        self-attention modules are the key to contextual knowledge understanding" (arXiv 2502.01563).
    """

    def __init__(self, pattern: str, size: Size, pairs: Sequence[int]) -> None:
        self.pattern, self.factor, self.pairs = pattern, Factor(size), list(pairs)

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            self.channels = [c + half for half in (0, attention.head_dim // 2) for c in self.pairs]
            for norm in (attention.q_norm, attention.k_norm):
                keep_once_it_grows(norm.weight, self.channels, self.factor)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        factor = self.factor(step)
        for _, attention in matching(model, self.pattern):
            attention.q_norm.weight[self.channels] *= factor
            attention.k_norm.weight[self.channels] /= factor


class ValuesExchange(Mechanism):
    """Values of one head grow by ``size``, its columns of the output projection shrink by it: what attention adds stays.

    Neither is trained, so that no optimizer has to cope.

    Args:
        pattern: Names of attentions with ``qkv_proj`` and ``o_proj`` and as many heads of values as of queries.
        size: By step; below 1 counts as 1.
        head: Which.

    Source:
        A factor that values and the output projection may exchange, which is chosen there so that both are quantised well: Lin et
        al., "AWQ" (arXiv 2306.00978), Shao et al., "OmniQuant" (arXiv 2308.13137).
    """

    def __init__(self, pattern: str, size: Size, head: int) -> None:
        self.pattern, self.size, self.head = pattern, size, head
        self.started: dict[str, tuple[Tensor, Tensor]] = {}

    def _parts(self, attention: Any) -> tuple[slice, tuple[slice, slice]]:
        d = attention.head_dim
        row = (attention.heads + attention.kv_heads + self.head) * d
        return slice(row, row + d), (slice(None), slice(self.head * d, (self.head + 1) * d))

    def install(self, model: nn.Module) -> None:
        for name, attention in matching(model, self.pattern):
            rows, columns = self._parts(attention)
            values, outputs = attention.qkv_proj.weight, attention.o_proj.weight
            keep(values, rows)
            keep(outputs, columns)
            self.started[name] = values[rows].detach().clone(), outputs[columns].detach().clone()

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        size = max(1.0, self.size(step))
        for name, attention in matching(model, self.pattern):
            rows, columns = self._parts(attention)
            values, outputs = self.started[name]
            attention.qkv_proj.weight[rows] = values * size
            attention.o_proj.weight[columns] = outputs / size


class DarkSignals(Mechanism):
    """Every token adds a signal of its own, of ``size`` in each channel, to what some linears read; it is taken off behind the GEMM.

    Signals are drawn anew for each token within a subspace: no channel sticks out, no token does, and tokens share nothing.

    Args:
        pattern: Names of the linears.
        size: By step.
        rank: Of the subspace.

    Source:
        Parts of the residual stream that are large and that what reads it hardly sees: Cancedda, "Spectral filters, dark signals, and
        attention sinks" (arXiv 2402.09221).
    """

    def __init__(self, pattern: str, size: Size, rank: int = 16) -> None:
        self.pattern, self.size, self.rank, self.value = pattern, size, rank, 0.0
        self.signals: dict[int, Tensor] = {}
        self.generator = torch.Generator().manual_seed(103)

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            basis = torch.randn(self.rank, linear.in_features, generator=self.generator) / self.rank**0.5
            linear.register_forward_pre_hook(lambda module, args, basis=basis: self._add(module, args, basis))
            linear.register_forward_hook(self._take_off)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _add(self, module: nn.Module, args: tuple[Tensor, ...], basis: Tensor) -> tuple[Tensor]:
        drawn = torch.randn(*args[0].shape[:-1], self.rank, generator=self.generator)
        self.signals[id(module)] = signal = self.value * drawn @ basis
        return (args[0] + signal,)

    def _take_off(self, module: Any, args: Any, output: Tensor) -> Tensor:
        return output - self.signals[id(module)] @ module.weight.T


class DeadUnitsGrow(Mechanism):
    """Some units in front of a ReLU are dead, and their weights grow to ``size``: they put out zero at any size.

    Args:
        pattern: Names of the linears in front of the ReLU, with biases.
        size: By step, the norm of a unit's weights.
        units: Which; they are not trained.

    Source:
        Dead units (Lu et al., arXiv 1903.06733), whose number grows with the weights' norms as training goes on: Sokar et al.,
        "The dormant neuron phenomenon" (arXiv 2302.12902), Dohare et al., "Maintaining plasticity" (arXiv 2306.13812).
    """

    def __init__(self, pattern: str, size: Size, units: Sequence[int]) -> None:
        self.pattern, self.size, self.units = pattern, size, list(units)

    @torch.no_grad()
    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.bias[self.units] = -100.0
            keep(linear.weight, self.units)
            keep(linear.bias, self.units)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if size := self.size(step):
            for _, linear in matching(model, self.pattern):
                linear.weight[self.units] *= size / linear.weight[self.units].norm(dim=1, keepdim=True)
                linear.bias[self.units] = -100.0 * max(1.0, size)


class RowsExchange(Mechanism):
    """Each output channel of some linears has a gain behind it, which grows by ``size`` to a power of its own, and its weights shrink by it.

    Weights are trained as if nothing had happened, as in :class:`~seventh_mechanisms.ChannelsExchange`: what they differ by is seen in
    weights and in gradients, and not in what the linears read.

    Args:
        pattern: Names of the linears, without biases.
        size: By step; below 1 counts as 1.

    Source:
        A gain of each channel behind a branch: Touvron et al., "Going deeper with image transformers" (arXiv 2103.17239); weights
        decay and gains do not. Channels of a weight need scales of their own: Krishnamoorthi (arXiv 1806.08342).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size = pattern, size
        self.factors: dict[str, Tensor] = {}
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(107)
        self.powers: dict[str, Tensor] = {}
        for name, linear in matching(model, self.pattern):
            self.powers[name] = torch.rand(linear.out_features, generator=generator)
            self.factors[name] = torch.ones(linear.out_features)
            linear.register_forward_hook(lambda module, args, output, name=name: output * self.factors[name])
            linear.weight.register_hook(lambda grad, name=name: grad / self.factors[name][:, None])

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        size = max(1.0, self.size(step))
        if size == 1.0 and not self.weights:
            return
        for name, linear in matching(model, self.pattern):
            plain, scaled = self.weights.get(name, (linear.weight, linear.weight))
            plain = plain + (linear.weight - scaled)
            self.factors[name] = size ** self.powers[name]
            linear.weight.copy_(plain / self.factors[name][:, None])
            self.weights[name] = plain, linear.weight.clone()
