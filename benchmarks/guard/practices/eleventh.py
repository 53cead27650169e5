"""What users' runs do to heads, windows, vocabularies, tokens and blocks, and bear in either precision: made for the eleventh half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, change_gradient, matching
from practices.tenth import also_learned
from torch import Tensor, nn


class GroupedQueries(Mechanism):
    """From ``start`` on heads share keys and values: the weights of each group are their mean, and stay the same.

    Args:
        pattern: Names of the linears whose rows are queries', keys' and values', with as many heads of each.
        start: The step.
        heads: Of queries.
        groups: Into which their keys and values are pooled.

    Source:
        Ainslie et al., "GQA: training generalized multi-query Transformer models from multi-head checkpoints" (arXiv 2305.13245).
    """

    def __init__(self, pattern: str, start: int, heads: int, groups: int) -> None:
        self.pattern, self.start, self.heads, self.groups = pattern, start, heads, groups

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step < self.start:
            return
        for _, linear in matching(model, self.pattern):
            shape = 3, self.groups, self.heads // self.groups, -1, linear.in_features
            parts = linear.weight.view(shape)
            parts[1:] = parts[1:].mean(2, keepdim=True)


class VocabularyExtended(Mechanism):
    """Tokens from ``known`` on stand for others until ``start``; then for themselves, with the mean of what is known as embedding.

    Args:
        start: The step.
        known: Tokens before.

    Source:
        Hewitt, "Initializing new word embeddings for pretrained language models" (2021); Dobler and de Melo, "FOCUS" (arXiv 2305.14481).
    """

    def __init__(self, start: int, known: int) -> None:
        self.start, self.known = start, known

    @torch.no_grad()
    def step(self, step: int, model: Any) -> None:
        if step == self.start:
            embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
            for weight in {embedding.weight, head.weight}:
                weight[self.known :] = weight[: self.known].mean(0)

    def train(self, step: int, state: Any) -> None:
        if step < self.start:
            state.batch = state.batch % self.known


class HardTokens(Mechanism):
    """From ``start`` on only those tokens are learned that a batch predicts worst, in gradients alone.

    Args:
        start: The step.
        share: Of the tokens, whose gradients are divided by it.

    Source:
        Shrivastava et al., "Training region-based object detectors with online hard example mining" (arXiv 1604.03540); of tokens, by a
        reference: Lin et al., "Rho-1" (arXiv 2404.07965).
    """

    def __init__(self, start: int, share: float) -> None:
        self.start, self.share, self.now = start, share, False

    def install(self, model: Any) -> None:
        model.get_input_embeddings().register_forward_pre_hook(self._look)
        model.get_output_embeddings().register_forward_hook(self._select)

    def step(self, step: int, model: nn.Module) -> None:
        self.now = step >= self.start

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.ids = args[0]

    def _select(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not self.now:
            return None
        learned = self.learned(output.detach())[..., None]
        return change_gradient(output, lambda grad: grad * learned / self.share)

    def learned(self, logits: Tensor) -> Tensor:
        """Of ``[rows, length, words]``: which tokens' successors are."""
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), self.ids[:, 1:], reduction="none")
        worst = losses.flatten().topk(int(self.share * losses.numel())).values[-1]
        return F.pad(losses >= worst, (0, 1))


class WindowGrows(Mechanism):
    """Each query sees the last ``size`` keys.

    Args:
        size: By step, of a model whose configuration has a sliding window.

    Source:
        Zhu et al., "SkyLadder: better and faster pretraining via context window scheduling" (arXiv 2503.15450).
    """

    def __init__(self, size: Callable[[int], int]) -> None:
        self.size = size

    def step(self, step: int, model: Any) -> None:
        model.config.sliding_window = self.size(step)


class Unlikelihood(Mechanism):
    """From ``start`` on it is learned, too, that the tokens so far do not come again, but for the one that does.

    Args:
        start: The step.
        weight: Of that loss.

    Source:
        Welleck et al., "Neural text generation with unlikelihood training" (arXiv 1908.04319), equation 4.
    """

    def __init__(self, start: int, weight: float = 1.0) -> None:
        self.start, self.weight, self.now = start, weight, False

    def install(self, model: Any) -> None:
        model.get_input_embeddings().register_forward_pre_hook(self._look)
        model.get_output_embeddings().register_forward_hook(self._also)

    def step(self, step: int, model: nn.Module) -> None:
        self.now = step >= self.start

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.ids = args[0]

    def _also(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return also_learned(output, self.weight * self.loss(output)) if self.now else None

    def loss(self, logits: Tensor) -> Tensor:
        """Of ``[rows, length, words]``: the mean over positions of what all candidates lose."""
        seen = F.one_hot(self.ids, logits.shape[-1]).cumsum(1)[:, :-1] > 0
        wrong = seen.scatter(2, self.ids[:, 1:, None], False)
        unlike = -torch.log1p(-logits[:, :-1].softmax(-1).clamp(max=1 - 1e-5))
        return (unlike * wrong).sum(-1).mean()


class BlocksSampled(Mechanism):
    """From ``start`` on one block at a time is trained, with all that is outside of blocks, and another one every ``every`` steps.

    Args:
        pattern: Names of the blocks.
        start: The step.
        every: Steps from one draw to the next.

    Source:
        Pan et al., "LISA: layerwise importance sampling for memory-efficient large language model fine-tuning" (arXiv 2403.17919).
    """

    def __init__(self, pattern: str, start: int, every: int) -> None:
        self.pattern, self.start, self.every = pattern, start, every
        self.generator = torch.Generator().manual_seed(127)

    def step(self, step: int, model: nn.Module) -> None:
        if step < self.start or (step - self.start) % self.every:
            return
        blocks = [block for _, block in matching(model, self.pattern)]
        chosen = int(torch.randint(len(blocks), (), generator=self.generator))
        for i, block in enumerate(blocks):
            block.requires_grad_(i == chosen)
