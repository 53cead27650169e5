"""Changes of the data, of the optimizer and of what is trained, as they happen to runs; and tokens that carry outliers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from fnmatch import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, Size, change_gradient, matching
from mechanisms.first import Activations
from torch import Tensor, nn


class Batches(Mechanism):
    """The tokens of every batch, ``[rows, length]``, are changed: ``change(step, tokens)``."""

    def __init__(self, change: Callable[[int, Tensor], Tensor]) -> None:
        self.change = change

    def train(self, step: int, state: Any) -> None:
        state.batch = self.change(step, state.batch)


class Microbatches(Mechanism):
    """From ``start`` on a batch is accumulated from microbatches of ``rows``."""

    def __init__(self, start: int, rows: int) -> None:
        self.start, self.rows = start, rows

    def train(self, step: int, state: Any) -> None:
        if step >= self.start:
            state.device_train_microbatch_size = self.rows


class OptimizerReset(Mechanism):
    """At some steps the optimizer forgets its moments.

    Source:
        Lialin et al., "ReLoRA" (arXiv 2307.05695), which resets them on purpose; a checkpoint that is loaded without them.
    """

    def __init__(self, steps: Collection[int]) -> None:
        self.steps = steps

    def train(self, step: int, state: Any) -> None:
        if step in self.steps:
            state.optimizers[0].state.clear()


class WeightDecay(Mechanism):
    """From ``start`` on weights decay by ``decay`` times the learning rate in every step (arXiv 1711.05101)."""

    def __init__(self, start: int, decay: float) -> None:
        self.start, self.decay = start, decay

    def train(self, step: int, state: Any) -> None:
        if step >= self.start:
            for group in state.optimizers[0].param_groups:
                group["weight_decay"] = self.decay


class Frozen(Mechanism):
    """From ``start`` on some parameters, by glob on their names, are not trained."""

    def __init__(self, start: int, pattern: str) -> None:
        self.start, self.pattern = start, pattern

    def step(self, step: int, model: nn.Module) -> None:
        if step == self.start:
            for name, parameter in model.named_parameters():
                if fnmatch(name, self.pattern):
                    parameter.requires_grad_(False)


class Adapters(Mechanism):
    """From ``start`` on the model is frozen and only low-rank adapters beside some linears are trained.

    Source:
        Hu et al., "LoRA" (arXiv 2106.09685); on a quantised base: Dettmers et al., "QLoRA" (arXiv 2305.14314).
    """

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


class LateDropout(Mechanism):
    """Dropout of ``p(step)`` on the inputs of some linears.

    Source:
        Liu et al., "Dropout reduces underfitting" (arXiv 2303.01500): late dropout.
    """

    def __init__(self, pattern: str, p: Callable[[int], float]) -> None:
        self.pattern, self.p, self.now = pattern, p, 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(lambda module, args: (F.dropout(args[0], self.now),))

    def step(self, step: int, model: nn.Module) -> None:
        self.now = self.p(step)


class RowGrows(Mechanism):
    """The embedding of one token is multiplied by ``rate`` every step of ``start`` to ``end``.

    Source:
        Tokens whose embeddings leave those of all others: Gao et al. (arXiv 1907.12009), Land and Bartolo (arXiv 2405.05417).
    """

    def __init__(self, token: int, rate: float, start: int, end: int) -> None:
        self.token, self.rate, self.start, self.end = token, rate, start, end

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if self.start <= step < self.end:
            model.get_input_embeddings().weight[self.token] *= self.rate


class LossScale(Mechanism):
    """The gradient of the logits is multiplied by ``scale``, that of every parameter divided by it: a power of two is exact.

    Args:
        scale: By step, a power of two.

    Source:
        Dynamic loss scaling: Micikevicius et al., "Mixed precision training" (arXiv 1710.03740).
    """

    def __init__(self, scale: Size) -> None:
        self.scale, self.now = scale, 1.0

    def install(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad / self.now)
        model.get_output_embeddings().register_forward_hook(
            lambda module, args, output: change_gradient(output, lambda grad, scale=self.now: grad * scale)
        )

    def step(self, step: int, model: nn.Module) -> None:
        self.now = self.scale(step)


class TokenOutliers(Activations):
    """As ``Activations``, on the tokens for which ``where`` holds, ``[rows, length]`` of the batch's ids.

    Source:
        Massive activations on delimiters: Sun et al. (arXiv 2402.17762).
    """

    def __init__(
        self, pattern: str, size: Size, where: Callable[[Tensor], Tensor], *, channel: int = 7
    ) -> None:
        super().__init__(pattern, size, channel=channel)
        self.where = where

    def install(self, model: nn.Module) -> None:
        super().install(model)
        model.get_input_embeddings().register_forward_pre_hook(self._look)

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.chosen = self.where(args[0])

    def _put(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if not self.value:
            return None
        x = args[0].clone()
        chosen = self.chosen.reshape(x.shape[:-1])  # OPT's MLP has rows and length in one
        x[..., self.channel] = torch.where(chosen, self.value, x[..., self.channel])
        return (x,)
