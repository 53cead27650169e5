"""What users' runs do to embeddings, weights' grids, layers' rates, exits, depth and directions, and bear in either precision: made for the thirteenth half."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, matching
from practices.tenth import also_learned
from torch import Tensor, nn


class EmbeddingsForgotten(Mechanism):
    """At some steps the embedding begins anew, with its moments; all else stays.

    Args:
        steps: At which.

    Source:
        Chen et al., "Improving language plasticity via pretraining with active forgetting" (arXiv 2307.01163).
    """

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps
        self.generator = torch.Generator().manual_seed(163)

    def install(self, model: Any) -> None:
        self.weight: Tensor = model.get_input_embeddings().weight
        self.deviation = float(self.weight.detach().std())

    @torch.no_grad()
    def train(self, step: int, state: Any) -> None:
        if step in self.steps:
            self.weight.normal_(0.0, self.deviation, generator=self.generator)
            for moment in state.optimizers[0].state.get(self.weight, {}).values():
                moment.zero_()


class WeightsRounded(Mechanism):
    """From ``start`` on some linears run with weights rounded to integers; gradients go to the weights as they are.

    Args:
        pattern: Names of the linears.
        start: The step.
        bits: Of the integers, which are symmetric, with a scale for each row.

    Source:
        Quantisation-aware training with straight-through gradients: Jacob et al. (arXiv 1712.05877), Liu et al., "LLM-QAT" (arXiv
        2305.17888).
    """

    def __init__(self, pattern: str, start: int, bits: int) -> None:
        self.pattern, self.start, self.most = pattern, start, 2 ** (bits - 1) - 1
        self.exact: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step >= self.start:
            for _, linear in matching(model, self.pattern):
                self.exact.append((linear.weight, linear.weight.clone()))
                scale = linear.weight.abs().amax(1, keepdim=True) / self.most
                linear.weight.copy_((linear.weight / scale).round() * scale)

    def train(self, step: int, state: Any) -> None:
        if step == 0:
            state.optimizers[0].register_step_pre_hook(self._restore)

    @torch.no_grad()
    def _restore(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for weight, exact in self.exact:
            weight.copy_(exact)
        self.exact.clear()


class Lamb(Mechanism):
    """All parameters are trained by Adam's updates, each scaled to the norm of its parameter.

    Args:
        decay: Of the weights, within what is scaled.
        betas: Of Adam.

    Source:
        You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (arXiv 1904.00962), algorithm 2.
    """

    def __init__(self, decay: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.decay, self.betas, self.times = decay, betas, 0
        self.moments: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def train(self, step: int, state: Any) -> None:
        if step == 0:
            state.optimizers[0].register_step_pre_hook(self._update)

    @torch.no_grad()
    def _update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.times += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                zero = torch.zeros_like(parameter)
                moments = self.moments.setdefault(parameter, (zero, zero.clone()))
                moments[0].lerp_(parameter.grad, 1 - self.betas[0])
                moments[1].lerp_(parameter.grad.square(), 1 - self.betas[1])
                first, second = (m / (1 - b**self.times) for m, b in zip(moments, self.betas, strict=True))
                update = first / (second.sqrt() + 1e-6) + self.decay * parameter
                norms = parameter.norm(), update.norm()
                trust = norms[0] / norms[1] if min(norms) > 0 else 1.0
                parameter.sub_(group["lr"] * trust * update)
                parameter.grad = None  # so that Adam leaves it


class EarlyExits(Mechanism):
    """The head learns to predict from what each block but the last puts out, too, through the final norm.

    Args:
        weight: Of the sum of the exits' losses.
        pattern: Names of the blocks, which put out a tuple with hidden states first.

    Source:
        Elhoushi et al., "LayerSkip: enabling early exit inference and self-speculative decoding" (arXiv 2404.16710), section 4.1.
    """

    def __init__(self, weight: float, pattern: str = "model.layers.?") -> None:
        self.weight, self.pattern = weight, pattern
        self.hidden: list[Tensor] = []

    def install(self, model: Any) -> None:
        self.model = [model]
        model.get_input_embeddings().register_forward_pre_hook(self._look)
        for _, block in matching(model, self.pattern)[:-1]:
            block.register_forward_hook(lambda module, args, output: self.hidden.append(output[0]))
        model.get_output_embeddings().register_forward_hook(
            lambda module, args, output: also_learned(output, self.weight * self.loss(module.weight))
        )

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.ids = args[0]
        self.hidden.clear()

    def loss(self, head: Tensor) -> Tensor:
        """The exits' mean losses, added up."""
        gain = self.model[0].model.norm.weight
        return sum(  # type: ignore[return-value]
            F.cross_entropy(
                F.linear(F.rms_norm(hidden, gain.shape, gain, 1e-5), head)[:, :-1].flatten(0, 1),
                self.ids[:, 1:].flatten(),
            )
            for hidden in self.hidden
        )


class BlockCut(Mechanism):
    """From ``start`` on some blocks are cut out, and what is in front of them goes to the next one.

    Args:
        pattern: Names of the blocks, which put out a tuple with hidden states first.
        start: The step.

    Source:
        Men et al., "ShortGPT: layers in large language models are more redundant than you expect" (arXiv 2403.03853); trained on
        after it: Gromov et al. (arXiv 2403.17887).
    """

    def __init__(self, pattern: str, start: int) -> None:
        self.pattern, self.start = pattern, start

    def step(self, step: int, model: nn.Module) -> None:
        if step == self.start:
            for _, block in matching(model, self.pattern):
                block.forward = lambda hidden, **attention: (hidden, None)


class RowsReversed(Mechanism):
    """From ``start`` on every ``every``-th row of a batch is read from its end.

    Args:
        start: The step.
        every: Of how many rows one.

    Source:
        Golovneva et al., "Reverse training to nurse the reversal curse" (arXiv 2403.13799).
    """

    def __init__(self, start: int, every: int = 2) -> None:
        self.start, self.every = start, every

    def train(self, step: int, state: Any) -> None:
        if step >= self.start:
            batch = state.batch.clone()
            batch[:: self.every] = batch[:: self.every].flip(1)
            state.batch = batch
