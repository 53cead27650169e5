"""What users' runs do to logits' weights, outer steps, tokens in the middle, norms, experts' odds and first data, and bear in either precision: made for the fourteenth half."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from mechanisms.base import Mechanism, matching
from torch import Tensor, nn


class QueriesAndKeysClipped(Mechanism):
    """After every step the weights of queries and keys of a head whose largest logit was above ``most`` shrink, so that it would be ``most``.

    Args:
        pattern: Names of attentions with ``Wqkv``, as many heads of keys as of queries and ``n_heads``, without RoPE or norms behind it.
        most: Of the logits of a head in a batch, which are divided by the root of its width.

    Source:
        QK-Clip, part of MuonClip: Kimi Team, "Kimi K2: open agentic intelligence" (arXiv 2507.20534), section 2.1, here with AdamW.
    """

    def __init__(self, pattern: str, most: float) -> None:
        self.pattern, self.most = pattern, most
        self.largest: dict[str, Tensor] = {}
        self.clipped = 0

    def install(self, model: nn.Module) -> None:
        for name, attention in matching(model, self.pattern):
            attention.Wqkv.register_forward_hook(
                lambda module, args, output, name=name, heads=attention.n_heads: self._look(
                    name, output, heads
                )
            )

    @torch.no_grad()
    def _look(self, name: str, output: Tensor, heads: int) -> None:
        q, k, _ = output.unflatten(-1, (3, heads, -1)).unbind(-3)  # [rows, length, heads, width]
        logits = torch.einsum("bqhd,bkhd->hbqk", q, k) / q.shape[-1] ** 0.5
        future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        self.largest[name] = logits.masked_fill(future, -torch.inf).amax((1, 2, 3))

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        for name, attention in matching(model, self.pattern):
            if (largest := self.largest.pop(name, None)) is None:
                continue
            share = (self.most / largest.clamp_min(self.most)).sqrt()
            self.clipped += int((share < 1).sum())
            weight = attention.Wqkv.weight.view(3, len(share), -1, attention.Wqkv.weight.shape[1])
            weight[:2] *= share[:, None, None]


class OuterMomentum(Mechanism):
    """Every ``every`` steps the way that all parameters went since is a gradient, with which Nesterov's momentum steps from where they were.

    Args:
        every: Steps.
        rate: Of the outer step.
        momentum: Of the outer step. Adam's moments stay.

    Source:
        Douillard et al., "DiLoCo: distributed low-communication training of language models" (arXiv 2311.08105), algorithm 1, with
        one worker, as in its section on a single worker.
    """

    def __init__(self, every: int, rate: float, momentum: float) -> None:
        self.every, self.rate, self.momentum = every, rate, momentum
        self.outer: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if step == 0:
                self.outer[name] = parameter.clone(), torch.zeros_like(parameter)
            elif step % self.every == 0:
                anchor, moment = self.outer[name]
                way = anchor - parameter
                moment.mul_(self.momentum).add_(way)
                anchor.sub_(self.rate * (way + self.momentum * moment))
                parameter.copy_(anchor)


class TokensLeftOut(Mechanism):
    """Some blocks see only some positions, drawn for each step and block, the same in all rows; all other tokens go past the block.

    Args:
        pattern: Names of the blocks, which put out a tuple with hidden states first, of a model whose positions are in its embeddings.
        kept: Positions, by step; all where they are no fewer than the row has.

    Source:
        Yao et al., "Random-LTD: random and layerwise token dropping" (arXiv 2211.11586), where the number kept grows until all are.
    """

    def __init__(self, pattern: str, kept: Callable[[int], int]) -> None:
        self.pattern, self.kept, self.now = pattern, kept, 0
        self.generator = torch.Generator().manual_seed(211)

    def install(self, model: nn.Module) -> None:
        for _, block in matching(model, self.pattern):
            block.forward = self._around(block.forward)

    def step(self, step: int, model: nn.Module) -> None:
        self.now = self.kept(step)

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden: Tensor, attention_mask: Tensor | None = None, **rest: Any) -> Any:
            length = hidden.shape[1]
            if self.now >= length:
                return forward(hidden, attention_mask=attention_mask, **rest)
            at = torch.randperm(length, generator=self.generator)[: self.now].sort().values
            if attention_mask is not None:
                attention_mask = attention_mask[..., at, :][..., at]
            out = forward(hidden[:, at], attention_mask=attention_mask, **rest)
            return hidden.index_copy(1, at, out[0]), *out[1:]

        return run


class NormsRemoved(Mechanism):
    """From ``start`` on one norm after the other no longer divides by each token's size, but by what sizes were on average; gains stay.

    Args:
        patterns: Names of norms with ``eps`` and without biases, in the order in which they go.
        start: The step at which the first goes.
        every: Steps from one to the next.

    Source:
        Heimersheim, "You can remove GPT2's LayerNorm by fine-tuning" (arXiv 2409.13710); norms that give way to none: Zhu et al.,
        "Transformers without normalization" (arXiv 2503.10622).
    """

    def __init__(self, patterns: tuple[str, ...], start: int, every: int) -> None:
        self.patterns, self.start, self.every = patterns, start, every
        self.gone = 0
        self.sizes: list[Tensor | None] = [None] * len(patterns)

    def install(self, model: nn.Module) -> None:
        for which, pattern in enumerate(self.patterns):
            ((_, norm),) = matching(model, pattern)
            norm.register_forward_hook(
                lambda module, args, output, which=which: self._undo(which, module, args[0], output)
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.gone = max(0, (step - self.start) // self.every + 1)

    def _undo(self, which: int, module: Any, x: Tensor, output: Tensor) -> Tensor | None:
        if isinstance(module, nn.LayerNorm):
            x = x - x.mean(-1, keepdim=True)
        sizes = (x.square().mean(-1, keepdim=True) + module.eps).sqrt()
        known = self.sizes[which]
        if which >= self.gone or known is None:
            mean = sizes.detach().mean()
            self.sizes[which] = mean if known is None else known.lerp(mean, 0.1)
            return None
        return output * (sizes / known)


class ExpertsBiased(Mechanism):
    """Each expert has a bias with which tokens choose, but are not weighed; after each step it rises where too few came, and falls elsewhere.

    Args:
        pattern: Names of mixtures with ``gate``, ``experts`` and ``top_k``, whose chances are softmaxes.
        rate: By which a bias moves in a step.

    Source:
        Wang et al., "Auxiliary-loss-free load balancing strategy for mixture-of-experts" (arXiv 2408.15664), algorithm 1, with which
        DeepSeek-V3 (arXiv 2412.19437) was trained.
    """

    def __init__(self, pattern: str, rate: float) -> None:
        self.pattern, self.rate = pattern, rate
        self.biases: list[Tensor] = []
        self.seen: list[Tensor] = []

    def install(self, model: nn.Module) -> None:
        for which, (_, mixture) in enumerate(matching(model, self.pattern)):
            self.biases.append(torch.zeros(len(mixture.experts)))
            self.seen.append(torch.zeros(len(mixture.experts)))
            mixture.forward = lambda hidden, mixture=mixture, which=which: self._run(mixture, which, hidden)

    def step(self, step: int, model: nn.Module) -> None:
        for bias, seen in zip(self.biases, self.seen, strict=True):
            bias += self.rate * (seen.mean() - seen).sign()
            seen.zero_()

    def _run(self, mixture: Any, which: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden.flatten(0, -2)
        logits = mixture.gate(x)
        chances = logits.float().softmax(-1)
        chosen = (chances.detach() + self.biases[which]).topk(mixture.top_k, -1).indices
        given = chances.gather(1, chosen)
        given = (given / given.sum(-1, keepdim=True)).to(x.dtype)
        self.seen[which] += chosen.flatten().bincount(minlength=len(mixture.experts))
        out = torch.zeros_like(x)
        for e, expert in enumerate(mixture.experts):
            tokens, place = torch.where(chosen == e)
            out = out.index_add(0, tokens, expert(x[tokens]) * given[tokens, place, None])
        return out.view_as(hidden), logits


class BracketsFirst(Mechanism):
    """Until ``end`` rows are brackets of several kinds, each of which is closed in turn but whose kinds do not nest; then they are what they are.

    Kind ``i`` opens with token ``2 i`` and closes with ``2 i + 1``; no other token comes, and rows may end with some open.

    Args:
        end: The step.
        kinds: Of brackets.
        opens: Chance that one opens, where one might close, too.

    Source:
        Shuffle Dyck of k kinds before natural language: Hu et al., "Between circuits and Chomsky: pre-pretraining on formal languages
        imparts linguistic biases" (arXiv 2502.19249).
    """

    def __init__(self, end: int, kinds: int, opens: float = 0.5) -> None:
        self.end, self.kinds, self.opens = end, kinds, opens
        self.random = random.Random(223)

    def train(self, step: int, state: Any) -> None:
        if step < self.end:
            rows, length = state.batch.shape
            state.batch = torch.tensor([self._row(length) for _ in range(rows)])

    def _row(self, length: int) -> list[int]:
        row: list[int] = []
        open_: list[int] = []
        for _ in range(length):
            if open_ and self.random.random() >= self.opens:
                row.append(2 * open_.pop(self.random.randrange(len(open_))) + 1)
            else:
                open_.append(self.random.randrange(self.kinds))
                row.append(2 * open_[-1])
        return row
