"""What users' runs do to shared blocks, second generations, pretrained weights, experts, plateaus and sharpness, and bear in either precision: made for the fifteenth half."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, change_gradient, matching
from practices.tenth import also_learned
from torch import Tensor, nn


class BlocksShared(Mechanism):
    """Until ``start`` all blocks have the same weights, which learn from the mean of the blocks' gradients; then each has its own.

    Args:
        pattern: Names of the blocks, which are alike.
        start: The step.

    Source:
        Yang et al., "Speeding up deep model training by sharing weights and then unsharing" (arXiv 2110.03848).
    """

    def __init__(self, pattern: str, start: int) -> None:
        self.pattern, self.start, self.now = pattern, start, True

    @torch.no_grad()
    def install(self, model: nn.Module) -> None:
        (_, first), *others = matching(model, self.pattern)
        for _, block in others:
            block.load_state_dict(first.state_dict())

    def step(self, step: int, model: nn.Module) -> None:
        self.now, self.model = step < self.start, model

    def train(self, step: int, state: Any) -> None:
        if step == 0:
            state.optimizers[0].register_step_pre_hook(self._share)

    @torch.no_grad()
    def _share(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.now:
            blocks = [block.parameters() for _, block in matching(self.model, self.pattern)]
            for alike in zip(*blocks, strict=True):
                if alike[0].grad is not None:
                    mean = torch.stack([parameter.grad for parameter in alike]).mean(0)
                    for parameter in alike:
                        parameter.grad.copy_(mean)


class BornAgain(Mechanism):
    """At ``start`` all parameters and moments are what they began with, and from there on the model learns from its former self, too.

    Args:
        start: The step.
        weight: Of the cross entropy with the former self's probabilities, ``[rows, length, vocabulary]``, beside the tokens'.

    The former self runs in high precision and no FP8 layer sees it.

    Source:
        Furlanello et al., "Born-again neural networks" (arXiv 1805.04770).
    """

    def __init__(self, start: int, weight: float = 1.0) -> None:
        self.start, self.weight, self.now = start, weight, False

    def install(self, model: Any) -> None:
        self.first = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.former = copy.deepcopy(model).eval()  # not a part of the model, which FP8 is put into later
        model.get_input_embeddings().register_forward_pre_hook(self._look)
        model.get_output_embeddings().register_forward_hook(self._also)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        self.now = step >= self.start
        if step == self.start:
            theirs = dict(self.former.named_parameters())
            for name, parameter in model.named_parameters():
                theirs[name].copy_(parameter)
                parameter.copy_(self.first[name])

    def train(self, step: int, state: Any) -> None:
        if step == self.start:
            state.optimizers[0].state.clear()

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.ids = args[0]

    def _also(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self.now or not output.requires_grad:
            return None
        with torch.no_grad():
            taught = self.former(input_ids=self.ids, use_cache=False).logits.softmax(-1)
        loss = F.cross_entropy(output.flatten(0, 1), taught.flatten(0, 1))
        return also_learned(output, self.weight * loss)


class Mixout(Mechanism):
    """From ``start`` on a share of the weights, drawn for each step, is what it was at ``start``, and the others move further off to make up for it.

    Args:
        pattern: Names of the linears.
        start: The step.
        share: Chance ``p`` of each element to be the old one, ``w0``; others are ``w0 + (w - w0) / (1 - p)``.

    Source:
        Lee, Cho and Kang, "Mixout: effective regularization to finetune large-scale pretrained language models" (arXiv 1909.11299).
    """

    def __init__(self, pattern: str, start: int, share: float) -> None:
        self.pattern, self.start, self.share = pattern, start, share
        self.old: dict[str, Tensor] = {}
        self.kept: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self.generator = torch.Generator().manual_seed(227)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        self._put_back()
        if step < self.start:
            return
        for name, linear in matching(model, self.pattern):
            weight = linear.weight
            old = self.old.setdefault(name, weight.detach().clone())
            factor = (torch.rand(weight.shape, generator=self.generator) >= self.share) / (1 - self.share)
            self.kept.append((weight, weight.detach().clone(), factor))
            weight.copy_(old + (weight - old) * factor)

    def train(self, step: int, state: Any) -> None:
        if step == 0:
            state.optimizers[0].register_step_pre_hook(lambda *_: self._put_back())

    @torch.no_grad()
    def _put_back(self) -> None:
        for weight, own, factor in self.kept:
            weight.copy_(own)
            if weight.grad is not None:
                weight.grad.mul_(factor)
        self.kept.clear()


class ExpertsPruned(Mechanism):
    """From ``start`` on only those experts of each mixture are left that tokens chose most often so far; no token goes to others.

    Args:
        pattern: Names of the routers' linears, whose outputs end in ``[..., experts]``.
        start: The step.
        left: How many experts are left in each mixture.
        chosen: Experts that a token is seen by.

    Source:
        Lu et al., "Not all experts are equal: efficient expert pruning and skipping for mixture-of-experts large language models"
        (arXiv 2402.14800), by counts here instead of by what is lost without them.
    """

    def __init__(self, pattern: str, start: int, left: int, chosen: int = 2) -> None:
        self.pattern, self.start, self.left, self.chosen = pattern, start, left, chosen
        self.counts: dict[str, Tensor] = {}
        self.pruned: dict[str, Tensor] = {}

    def install(self, model: nn.Module) -> None:
        for name, gate in matching(model, self.pattern):
            gate.register_forward_hook(
                lambda module, args, output, name=name: self._choose(name, output.detach(), output)
            )

    def step(self, step: int, model: nn.Module) -> None:
        if step == self.start:
            for name, counts in self.counts.items():
                self.pruned[name] = torch.ones(len(counts), dtype=torch.bool)
                self.pruned[name][counts.topk(self.left).indices] = False

    def _choose(self, name: str, odds: Tensor, output: Tensor) -> Tensor | None:
        if name in self.pruned:
            return output.masked_fill(self.pruned[name], -torch.inf)
        experts = odds.shape[-1]
        counts = odds.topk(self.chosen, -1).indices.flatten().bincount(minlength=experts)
        self.counts[name] = self.counts.get(name, 0) + counts
        return None


class Flooded(Mechanism):
    """Where a batch's loss is below ``level``, it is made larger: the gradient changes its sign, and the loss stays around that level.

    Args:
        level: Of the loss.

    Source:
        Ishida et al., "Do we need zero training loss after achieving zero training error?" (arXiv 2002.08709).
    """

    def __init__(self, level: float) -> None:
        self.level = level
        self.turned = 0

    def install(self, model: Any) -> None:
        model.get_input_embeddings().register_forward_pre_hook(self._look)
        model.get_output_embeddings().register_forward_hook(self._flood)

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.ids = args[0]

    def _flood(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        logits = output.detach()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), self.ids[:, 1:].flatten())
        if loss >= self.level:
            return None
        self.turned += 1
        return change_gradient(output, torch.neg)


class SharpnessAware(Mechanism):
    """From ``start`` on gradients are those at weights a step of norm ``rho`` uphill, found by a pass over the same batch; weights then step from where they were.

    Args:
        rho: The norm of the step uphill, over all parameters.
        start: The step.

    Both passes run in FP8 where the model does, so that histories see either's weights in turn.

    Source:
        Foret et al., "Sharpness-aware minimization for efficiently improving generalization" (arXiv 2010.01412); of language models:
        Bahri et al. (arXiv 2110.08529).
    """

    def __init__(self, rho: float, start: int = 0) -> None:
        self.rho, self.start = rho, start
        self.kept: list[tuple[nn.Parameter, Tensor]] = []

    def train(self, step: int, state: Any) -> None:
        optimizer = state.optimizers[0]
        if step == 0:
            optimizer.register_step_pre_hook(lambda *_: self._back())
        if step < self.start:
            return
        optimizer.zero_grad()
        state.model.loss(state.model(state.batch), state.batch).backward()
        with torch.no_grad():
            moved = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in moved]).norm()
            for parameter in moved:
                self.kept.append((parameter, parameter.detach().clone()))
                parameter.add_(parameter.grad * (self.rho / (norm + 1e-12)))
        optimizer.zero_grad()

    @torch.no_grad()
    def _back(self) -> None:
        for parameter, own in self.kept:
            parameter.copy_(own)
        self.kept.clear()
