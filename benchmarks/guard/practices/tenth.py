"""What users' runs do to updates, units, positions, experts and rows, and bear in either precision: made for the tenth half."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, matching
from torch import Tensor, nn


class _AlsoLearned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, grad.new_ones(())


def also_learned(output: Tensor, loss: Tensor) -> Tensor:
    """``output``, of whoever learns from which ``loss`` is learned too; the loss that is noted is without it."""
    return _AlsoLearned.apply(output, loss)


class Lion(Mechanism):
    """All parameters are trained by the signs of an interpolated momentum; matrices decay.

    Args:
        decay: Times the rate.
        betas: Of the update, of the momentum.

    Source:
        Chen et al., "Symbolic discovery of optimization algorithms" (arXiv 2302.06675).
    """

    def __init__(self, decay: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        self.decay, self.betas = decay, betas
        self.moments: dict[Tensor, Tensor] = {}

    def train(self, step: int, state: Any) -> None:
        if step == 0:
            state.optimizers[0].register_step_pre_hook(self._update)

    @torch.no_grad()
    def _update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        ours, theirs = self.betas
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                moment = self.moments.setdefault(parameter, torch.zeros_like(parameter))
                update = moment.lerp(parameter.grad, 1 - ours).sign()
                moment.lerp_(parameter.grad, 1 - theirs)
                if parameter.dim() > 1:
                    parameter.mul_(1 - group["lr"] * self.decay)
                parameter.sub_(group["lr"] * update)
                parameter.grad = None  # so that Adam leaves it


class PositionsDropped(Mechanism):
    """From ``start`` on queries and keys are not turned: no position is told but by the causal mask.

    Args:
        start: The step, of a model with ``frequencies``.

    Source:
        Gelberg et al., "Extending the context of pretrained LLMs by dropping their positional embeddings" (arXiv 2512.12167).
    """

    def __init__(self, start: int) -> None:
        self.start = start

    def step(self, step: int, model: Any) -> None:
        if step == self.start:
            model.model.frequencies = [0.0] * len(model.model.frequencies)


class RowsRepeat(Mechanism):
    """From ``start`` on every other row is its first ``length`` tokens again and again.

    Source:
        Rows of related documents, which repeat each other: Shi et al., "In-context pretraining" (arXiv 2310.10638); heads that learn to
        copy, within few steps: Olsson et al., "In-context learning and induction heads" (arXiv 2209.11895).
    """

    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length

    def train(self, step: int, state: Any) -> None:
        if step >= self.start:
            ids = state.batch.clone()
            ids[::2] = ids[::2, torch.arange(ids.shape[1]) % self.length]
            state.batch = ids


class BalancedExperts(Mechanism):
    """The share of tokens that an expert sees times what its router gives it is learned to be small, and the router's logits too.

    Args:
        pattern: Names of the routers, linears that put out a logit for each expert.
        chosen: Experts by token.
        balance: Weight of the loss of balance.
        z: Weight of the square of the logits' log-sum-exp.

    Source:
        Fedus et al., "Switch Transformers" (arXiv 2101.03961), equation 4; Zoph et al., "ST-MoE" (arXiv 2202.08906), equation 5.
    """

    def __init__(self, pattern: str, chosen: int, balance: float = 1e-2, z: float = 1e-3) -> None:
        self.pattern, self.chosen, self.balance, self.z = pattern, chosen, balance, z

    def install(self, model: nn.Module) -> None:
        for _, router in matching(model, self.pattern):
            router.register_forward_hook(lambda module, args, output: also_learned(output, self.loss(output)))

    def loss(self, logits: Tensor) -> Tensor:
        """Of ``[tokens, experts]``; the balance is 1 times its weight where all are alike."""
        given = logits.softmax(-1)
        seen = F.one_hot(given.topk(self.chosen).indices, given.shape[1]).sum(1) / self.chosen
        balance = given.shape[1] * (seen.mean(0) * given.mean(0)).sum()
        return self.balance * balance + self.z * logits.logsumexp(-1).square().mean()


class FewerExperts(Mechanism):
    """From ``start`` on each token is seen by ``chosen`` experts; before by as many as the configuration says.

    Args:
        pattern: Names of what has ``top_k``.
        start: The step.
        chosen: From then on.

    Source:
        Nie et al., "EvoMoE" (arXiv 2112.14397), whose routers begin dense and become sparse.
    """

    def __init__(self, pattern: str, start: int, chosen: int) -> None:
        self.pattern, self.start, self.chosen = pattern, start, chosen

    def step(self, step: int, model: nn.Module) -> None:
        if step == self.start:
            for _, mixture in matching(model, self.pattern):
                mixture.top_k = self.chosen


class UnitsRenewed(Mechanism):
    """Every ``every`` steps of ``start`` to ``end`` the least useful units of an MLP begin anew, with weights behind them of zero.

    How useful a unit is: a running mean of its size times the sum of the sizes of the weights behind it.

    Args:
        pattern: Names of what has ``fc1`` and ``fc2``.
        start: The first step.
        end: The step from which none is renewed.
        every: Steps from one renewal to the next.
        share: Of the units, which are renewed at once.

    Source:
        Dohare et al., "Maintaining plasticity in deep continual learning" (arXiv 2306.13812).
    """

    def __init__(self, pattern: str, start: int, end: int, every: int, share: float) -> None:
        self.pattern, self.start, self.end, self.every, self.share = pattern, start, end, every, share
        self.generator = torch.Generator().manual_seed(107)

    def install(self, model: nn.Module) -> None:
        self.layers = [layer for _, layer in matching(model, self.pattern)]
        self.spread = [float(layer.fc1.weight.detach().std()) for layer in self.layers]
        self.sizes = [torch.zeros(layer.fc2.in_features) for layer in self.layers]
        for layer, size in zip(self.layers, self.sizes, strict=True):
            layer.fc2.register_forward_pre_hook(lambda module, args, size=size: self._look(size, args[0]))

    @staticmethod
    def _look(size: Tensor, x: Tensor) -> None:
        size.lerp_(x.detach().float().abs().flatten(0, -2).mean(0), 0.1)

    @torch.no_grad()
    def train(self, step: int, state: Any) -> None:
        if not self.start <= step < self.end or (step - self.start) % self.every:
            return
        moments = state.optimizers[0].state
        for layer, size, spread in zip(self.layers, self.sizes, self.spread, strict=True):
            useful = size * layer.fc2.weight.abs().sum(0)
            units = useful.argsort()[: int(self.share * len(useful))]
            fresh = torch.randn(len(units), layer.fc1.in_features, generator=self.generator)
            for parameter, index, value in (
                (layer.fc1.weight, units, spread * fresh),
                (layer.fc1.bias, units, 0.0),
                (layer.fc2.weight, (slice(None), units), 0.0),
            ):
                parameter[index] = value
                for name in ("exp_avg", "exp_avg_sq"):
                    if parameter in moments:
                        moments[parameter][name][index] = 0.0


class FurtherTokens(Mechanism):
    """From ``start`` on heads of their own predict the tokens after the next one from what the head reads.

    Args:
        start: The step.
        further: How many.
        weight: Of each one's loss.

    Source:
        Gloeckle et al., "Better and faster large language models via multi-token prediction" (arXiv 2404.19737), here with heads that are
        linear; a head that is taken in later: Aynetdinov and Akbik (arXiv 2505.22757).
    """

    def __init__(self, start: int, further: int, weight: float = 1.0) -> None:
        self.start, self.further, self.weight, self.now = start, further, weight, False

    def install(self, model: Any) -> None:
        head = model.get_output_embeddings()
        generator = torch.Generator().manual_seed(109)
        self.heads = nn.ParameterList(
            0.02 * torch.randn(head.weight.shape, generator=generator) for _ in range(self.further)
        )
        model.further = self.heads  # so that the optimizer has them
        model.get_input_embeddings().register_forward_pre_hook(self._look)
        head.register_forward_hook(self._also)

    def step(self, step: int, model: nn.Module) -> None:
        self.now = step >= self.start

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.ids = args[0]

    def _also(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        return also_learned(output, self.weight * self.loss(args[0])) if self.now else None

    def loss(self, hidden: Tensor) -> Tensor:
        """Of ``[rows, length, width]``: the heads' mean losses, added up."""
        return sum(  # type: ignore[return-value]
            F.cross_entropy((hidden[:, :-ahead] @ head.T).flatten(0, 1), self.ids[:, ahead:].flatten())
            for ahead, head in enumerate(self.heads, 2)
        )
