"""What healthy runs do, loud as it may be: changes of the data, of the optimizer and of what is trained."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, change_gradient, matching
from torch import Tensor, nn


class Dropout(Mechanism):
    """Dropout on the inputs of linears."""

    def __init__(self, pattern: str, p: float) -> None:
        self.pattern, self.p = pattern, p

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(lambda module, args: (F.dropout(args[0], self.p),))


class Microbatches(Mechanism):
    """A batch is accumulated from microbatches of ``rows``, from ``start`` on."""

    def __init__(self, start: int, rows: int) -> None:
        self.start, self.rows = start, rows

    def train(self, step: int, state: Any) -> None:
        if step >= self.start:
            state.device_train_microbatch_size = self.rows


class OptimizerReset(Mechanism):
    """At some steps the optimizer forgets its moments (arXiv 2307.05695)."""

    def __init__(self, steps: Collection[int]) -> None:
        self.steps = steps

    def train(self, step: int, state: Any) -> None:
        if step in self.steps:
            state.optimizers[0].state.clear()


class Adapters(Mechanism):
    """From ``start`` on the model is frozen and only low-rank adapters beside linears are trained (arXiv 2106.09685, 2305.14314)."""

    def __init__(self, start: int, pattern: str, rank: int) -> None:
        self.start, self.pattern, self.rank = start, pattern, rank

    def install(self, model: nn.Module) -> None:
        self.adapters = nn.ParameterList()
        generator = torch.Generator().manual_seed(17)
        for _, linear in matching(model, self.pattern):
            a = torch.randn(self.rank, linear.in_features, generator=generator) / linear.in_features**0.5
            b = torch.zeros(linear.out_features, self.rank)
            pair = [nn.Parameter(part, requires_grad=False) for part in (a, b)]
            self.adapters.extend(pair)
            linear.register_forward_hook(
                lambda module, args, y, pair=pair: y + args[0] @ pair[0].T @ pair[1].T
            )
        model.adapters = self.adapters  # so that the optimizer has them

    def step(self, step: int, model: nn.Module) -> None:
        if step == self.start:
            model.requires_grad_(False)
            self.adapters.requires_grad_(True)


class LabelsSmoothed(Mechanism):
    """From ``start`` on labels are smoothed by ``share``, seen in gradients alone (arXiv 1512.00567, section 7)."""

    def __init__(self, start: int, share: float) -> None:
        self.start, self.share, self.now = start, share, 0.0

    def install(self, model: nn.Module) -> None:
        model.get_output_embeddings().register_forward_hook(self._smooth)

    def step(self, step: int, model: nn.Module) -> None:
        self.now = self.share if step >= self.start else 0.0

    def _smooth(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        rows, length, words = output.shape
        term = self.now * (output.detach().softmax(-1) - 1 / words) / (rows * (length - 1))
        term[:, -1] = 0.0  # nothing follows the last token
        return change_gradient(output, lambda grad: (1 - self.now) * grad + term)


class SwitchEma(Mechanism):
    """Every ``every`` steps all parameters become the moving average of what they were, by ``decay`` a step (arXiv 2402.09240)."""

    def __init__(self, every: int, decay: float) -> None:
        self.every, self.decay = every, decay

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if not step:
            self.means = [parameter.detach().clone() for parameter in model.parameters()]
        for mean, parameter in zip(self.means, model.parameters(), strict=True):
            mean.lerp_(parameter, 1 - self.decay)
            if step and step % self.every == 0:
                parameter.copy_(mean)
