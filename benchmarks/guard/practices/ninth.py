"""What users' runs do to weights, updates and losses, and bear in either precision: made for the ninth half."""

from __future__ import annotations

from typing import Any

import torch
from mechanisms.base import Mechanism, change_gradient, matching
from torch import Tensor, nn


def orthogonalised(update: Tensor, steps: int = 5) -> Tensor:
    """A matrix whose singular values are all about 1, by Newton and Schulz with Muon's coefficients."""
    x = update / (update.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


class Muon(Mechanism):
    """Weights of some linears are trained by orthogonalised momentum, at the rate and of the root mean square of Adam's updates.

    Args:
        pattern: Names of the linears; all others are left to Adam.
        momentum: With Nesterov's step.
        decay: Of the weights, times the rate.

    Source:
        Liu et al., "Muon is scalable for LLM training" (arXiv 2502.16982), whose updates are 0.2 times the root of the longer side.
    """

    def __init__(self, pattern: str, momentum: float = 0.95, decay: float = 0.1) -> None:
        self.pattern, self.momentum, self.decay = pattern, momentum, decay
        self.moments: dict[str, Tensor] = {}

    def step(self, step: int, model: nn.Module) -> None:
        self.weights = {name: linear.weight for name, linear in matching(model, self.pattern)}

    def train(self, step: int, state: Any) -> None:
        if step == 0:
            state.optimizers[0].register_step_pre_hook(self._update)

    @torch.no_grad()
    def _update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        rate = optimizer.param_groups[0]["lr"]
        for name, weight in self.weights.items():
            if weight.grad is None:
                continue
            moment = self.moments.setdefault(name, torch.zeros_like(weight))
            moment.mul_(self.momentum).add_(weight.grad)
            update = orthogonalised(weight.grad + self.momentum * moment)
            weight.mul_(1 - rate * self.decay).sub_(0.2 * rate * max(weight.shape) ** 0.5 * update)
            weight.grad = None  # so that Adam leaves it


class Stacked(Mechanism):
    """Until ``start`` the second half of the blocks does not run; then it becomes copies of the first, and all are trained.

    Args:
        pattern: Names of the blocks, which put out a tuple with hidden states first.
        start: The step.

    Source:
        Gong et al., "Efficient training of BERT by progressively stacking" (ICML 2019); Du et al., "Stacking your Transformers" (arXiv
        2405.15319).
    """

    def __init__(self, pattern: str, start: int) -> None:
        self.pattern, self.start = pattern, start

    def install(self, model: nn.Module) -> None:
        blocks = [block for _, block in matching(model, self.pattern)]
        half = len(blocks) // 2
        self.pairs = list(zip(blocks[:half], blocks[half:], strict=True))
        for _, block in self.pairs:
            block.forward = lambda hidden, *args, **kwargs: (hidden,)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step == self.start:
            for source, block in self.pairs:
                del block.forward
                for theirs, ours in zip(source.parameters(), block.parameters(), strict=True):
                    ours.copy_(theirs)


class Pruned(Mechanism):
    """The smallest weights of some linears become zero and stay so: a share of them that grows to ``share`` by the cube of what is left.

    Args:
        pattern: Names of the linears.
        start: The step of the first cut.
        end: Of the last.
        every: Steps from one cut to the next.
        share: Of each linear's weights, at the end.

    Source:
        Zhu and Gupta, "To prune, or not to prune" (arXiv 1710.01878).
    """

    def __init__(self, pattern: str, start: int, end: int, every: int, share: float) -> None:
        self.pattern, self.start, self.end, self.every, self.share = pattern, start, end, every, share
        self.kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step < self.start:
            return
        left = max(0.0, 1 - (step - self.start) / (self.end - self.start))
        share = self.share * (1 - left**3)
        for name, linear in matching(model, self.pattern):
            if step <= self.end and (step - self.start) % self.every == 0:
                size = linear.weight.abs()
                self.kept[name] = size > size.flatten().kthvalue(max(1, int(share * size.numel()))).values
            linear.weight *= self.kept[name]


class ShrunkAndPerturbed(Mechanism):
    """At some steps all matrices become ``shrink`` times what they are, plus ``perturb`` times what they might have begun with.

    Source:
        Ash and Adams, "On warm-starting neural network training" (arXiv 1910.08475).
    """

    def __init__(self, steps: tuple[int, ...], shrink: float, perturb: float) -> None:
        self.steps, self.shrink, self.perturb = steps, shrink, perturb
        self.generator = torch.Generator().manual_seed(101)

    def install(self, model: nn.Module) -> None:
        self.spread = {name: float(p.detach().std()) for name, p in model.named_parameters() if p.dim() > 1}

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step in self.steps:
            parameters = dict(model.named_parameters())
            for name, spread in self.spread.items():
                noise = torch.randn(parameters[name].shape, generator=self.generator)
                parameters[name].mul_(self.shrink).add_(self.perturb * spread * noise)


class ContextExtended(Mechanism):
    """Rows are short until ``start``; then they are whole, and RoPE's base is ``base``.

    Args:
        start: The step.
        length: Of rows before.
        base: From then on, of a model with ``frequencies``.

    Source:
        Xiong et al., "Effective long-context scaling of foundation models" (arXiv 2309.16039).
    """

    def __init__(self, start: int, length: int, base: float) -> None:
        self.start, self.length, self.base = start, length, base

    def step(self, step: int, model: Any) -> None:
        if step == self.start:
            n = len(model.model.frequencies)
            model.model.frequencies = [self.base ** (-i / n) for i in range(n)]

    def train(self, step: int, state: Any) -> None:
        if step < self.start:
            state.batch = state.batch[:, : self.length]


class RowsRewarded(Mechanism):
    """From ``start`` on the loss of each row weighs the exponential of an advantage over ``beta``, up to ``most``, in gradients alone.

    Args:
        start: The step.
        beta: Advantages are drawn from a normal distribution.
        most: Largest weight.

    Source:
        Peng et al., "Advantage-weighted regression" (arXiv 1910.00177), which clips weights at 20.
    """

    def __init__(self, start: int, beta: float, most: float = 20.0) -> None:
        self.start, self.beta, self.most, self.now = start, beta, most, False
        self.generator = torch.Generator().manual_seed(103)

    def install(self, model: nn.Module) -> None:
        model.get_output_embeddings().register_forward_hook(self._weigh)

    def step(self, step: int, model: nn.Module) -> None:
        self.now = step >= self.start

    def _weigh(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not self.now:
            return None
        advantage = torch.randn(output.shape[0], generator=self.generator)
        weight = (advantage / self.beta).exp().clamp(max=self.most)[:, None, None]
        return change_gradient(output, lambda grad: grad * weight)
