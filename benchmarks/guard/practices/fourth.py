"""Changes that runs bear in either precision, loud as they may be: made for the fourth half."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch
from mechanisms.base import Mechanism, change_gradient, matching
from torch import Tensor, nn


class LayerDrop(Mechanism):
    """From ``start`` on each block is left out of a step with probability ``p``: it gets no gradient there.

    Source:
        Fan et al., "Reducing Transformer depth on demand with structured dropout" (arXiv 1909.11556).
    """

    def __init__(self, pattern: str, start: int, p: float) -> None:
        self.pattern, self.start, self.p = pattern, start, p
        self.generator = torch.Generator().manual_seed(31)
        self.left_out: set[str] = set()

    def install(self, model: nn.Module) -> None:
        self.names = [name for name, _ in matching(model, self.pattern)]
        for name, block in matching(model, self.pattern):
            block.register_forward_hook(
                lambda module, args, output, name=name: self._pass(name, args, output)
            )

    def step(self, step: int, model: nn.Module) -> None:
        drawn = torch.rand(len(self.names), generator=self.generator).tolist()
        self.left_out = {
            n for n, x in zip(self.names, drawn, strict=True) if step >= self.start and x < self.p
        }

    def _pass(self, name: str, args: Any, output: Any) -> Any:
        if name not in self.left_out:
            return None
        return (args[0], *output[1:]) if isinstance(output, tuple) else args[0]


class Averaged(Mechanism):
    """At ``at`` all parameters become the mean of their last ``steps`` values.

    Source:
        Latest weight averaging: Sanyal et al. (arXiv 2306.03241).
    """

    def __init__(self, at: int, steps: int) -> None:
        self.at, self.steps = at, steps

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step == self.at - self.steps:
            self.sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        if self.at - self.steps <= step < self.at:
            for total, parameter in zip(self.sums, model.parameters(), strict=True):
                total += parameter / self.steps
        if step == self.at:
            for total, parameter in zip(self.sums, model.parameters(), strict=True):
                parameter.copy_(total)


class Rotated(Mechanism):
    """From ``start`` on what some linears read, and their weights with it, is turned by an orthogonal matrix: the product stays.

    Source:
        Ashkboos et al., "QuaRot" (arXiv 2404.00456).
    """

    def __init__(self, pattern: str, start: int) -> None:
        self.pattern, self.start, self.turned = pattern, start, False

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(37)
        self.turns: dict[str, Tensor] = {}
        for name, linear in matching(model, self.pattern):
            n = linear.in_features
            self.turns[name] = turn = torch.linalg.qr(torch.randn(n, n, generator=generator))[0]
            linear.register_forward_pre_hook(
                lambda module, args, turn=turn: (args[0] @ turn,) if self.turned else None
            )

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step == self.start:
            self.turned = True
            for name, linear in matching(model, self.pattern):
                linear.weight.copy_(linear.weight @ self.turns[name])


class SignFlips(Mechanism):
    """Every ``every`` steps from ``start`` on a third of a gated unit's neurons changes sign, before and behind: its function stays.

    Source:
        Symmetries of sign and permutation of neurons: Ainsworth et al., "Git Re-Basin" (arXiv 2209.04836), Godfrey et al. (arXiv
        2205.14258).
    """

    def __init__(self, pattern: str, start: int, every: int) -> None:
        self.pattern, self.start, self.every = pattern, start, every
        self.generator = torch.Generator().manual_seed(41)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step < self.start or (step - self.start) % self.every:
            return
        for _, mlp in matching(model, self.pattern):
            n = mlp.down_proj.in_features
            sign = 1 - 2 * (torch.rand(n, generator=self.generator) < 1 / 3).float()
            mlp.gate_up_proj.weight[n:] *= sign[:, None]
            mlp.down_proj.weight *= sign


class ZLoss(Mechanism):
    """From ``start`` on the loss has a term of ``weight`` times the square of the logits' log-sum-exp, seen in gradients alone.

    Source:
        Chowdhery et al., "PaLM" (arXiv 2204.02311), section 5.
    """

    def __init__(self, start: int, weight: float) -> None:
        self.start, self.weight, self.now = start, weight, 0.0

    def install(self, model: nn.Module) -> None:
        model.get_output_embeddings().register_forward_hook(self._add)

    def step(self, step: int, model: nn.Module) -> None:
        self.now = self.weight if step >= self.start else 0.0

    def _add(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        logits = output.detach()
        tokens = logits[..., 0].numel()
        term = 2 * self.now / tokens * logits.logsumexp(-1, keepdim=True) * logits.softmax(-1)
        return change_gradient(output, lambda grad: grad + term)


class EmbeddingNoise(Mechanism):
    """From ``start`` on embeddings are added noise of ``share`` of their own size.

    Source:
        Jain et al., "NEFTune" (arXiv 2310.05914).
    """

    def __init__(self, start: int, share: float) -> None:
        self.start, self.share, self.now = start, share, 0.0
        self.generator = torch.Generator().manual_seed(43)

    def install(self, model: nn.Module) -> None:
        model.get_input_embeddings().register_forward_hook(self._shake)

    def step(self, step: int, model: nn.Module) -> None:
        self.now = self.share if step >= self.start else 0.0

    def _shake(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, generator=self.generator)
        return output + self.now * output.detach().std() * noise


class GradientNoise(Mechanism):
    """From ``start`` on every parameter's gradient is added noise of ``share`` of its own size.

    Source:
        Neelakantan et al., "Adding gradient noise improves learning for very deep networks" (arXiv 1511.06807).
    """

    def __init__(self, start: int, share: Callable[[int], float]) -> None:
        self.start, self.share, self.now = start, share, 0.0
        self.generator = torch.Generator().manual_seed(47)

    def install(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(
                lambda grad: (
                    grad
                    + self.now
                    * grad.square().mean().sqrt()
                    * torch.randn(grad.shape, generator=self.generator)
                )
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.now = self.share(step) if step >= self.start else 0.0


class Thaw(Mechanism):
    """Some parameters, by glob on their names, are not trained before ``start``.

    Source:
        Gradual unfreezing: Howard and Ruder, "ULMFiT" (arXiv 1801.06146).
    """

    def __init__(self, start: int, pattern: str) -> None:
        self.start, self.pattern = start, pattern

    def install(self, model: nn.Module) -> None:
        self._train(model, False)

    def step(self, step: int, model: nn.Module) -> None:
        if step == self.start:
            self._train(model, True)

    def _train(self, model: nn.Module, trained: bool) -> None:
        for name, parameter in model.named_parameters():
            if fnmatch(name, self.pattern):
                parameter.requires_grad_(trained)


class Replay(Mechanism):
    """Every ``every``-th batch has the last ``batches`` in it again: it is that much larger."""

    def __init__(self, every: int, batches: int) -> None:
        self.every, self.batches = every, batches
        self.last: list[Tensor] = []

    def train(self, step: int, state: Any) -> None:
        self.last = [*self.last, state.batch][-self.batches - 1 :]
        if step % self.every == self.every - 1:
            state.batch = torch.cat(self.last)
