"""What spoils scales, channels and gradients of a user's FP8 run, and practice that only looks alarming: made for the seventh half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mechanisms.base import Mechanism, Several, Size, matching
from mechanisms.second import GradientOutliers
from torch import Tensor, nn

from foundry_fp8.layers.linear import FP8Linear


class ChannelsExchange(Mechanism):
    """Each input channel of some linears is multiplied by ``size`` to a power of its own, and its weights are divided by it.

    Weights are trained as if nothing had happened: their gradient is divided too, and what the optimizer adds is added to what the
    weights would be. So high precision is as it was, step by step.

    Args:
        pattern: Names of the linears.
        size: By step; below 1 counts as 1.
        even: All channels have the power 1; otherwise powers are drawn between 0 and 1.

    Source:
        A factor of each channel that activations and weights may exchange: Xiao et al., "SmoothQuant" (arXiv 2211.10438), which
        chooses it so that both are quantised well.
    """

    def __init__(self, pattern: str, size: Size, *, even: bool = False) -> None:
        self.pattern, self.size, self.even = pattern, size, even
        self.factors: dict[str, Tensor] = {}
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(89)
        self.powers: dict[str, Tensor] = {}
        for name, linear in matching(model, self.pattern):
            n = linear.in_features
            self.powers[name] = torch.ones(n) if self.even else torch.rand(n, generator=generator)
            self.factors[name] = torch.ones(n)
            linear.register_forward_pre_hook(lambda module, args, name=name: (args[0] * self.factors[name],))
            linear.weight.register_hook(lambda grad, name=name: grad / self.factors[name])

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        size = max(1.0, self.size(step))
        if size == 1.0 and not self.weights:
            return
        for name, linear in matching(model, self.pattern):
            plain, scaled = self.weights.get(name, (linear.weight, linear.weight))
            plain = plain + (linear.weight - scaled)
            self.factors[name] = size ** self.powers[name]
            linear.weight.copy_(plain / self.factors[name])
            self.weights[name] = plain, linear.weight.clone()


class AmaxOfAnother(Mechanism):
    """From another rank the amaxes of some linears come as ``size``, and the largest of all ranks counts.

    Args:
        pattern: Names of the linears.
        size: By step.
        operands: Whose amaxes.

    Source:
        The largest amax of all data-parallel ranks sets the scales of all: Transformer Engine's ``reduce_amax``; scales of
        gradients that one rank's overflow takes from all: Peng et al., "FP8-LM" (arXiv 2310.18313).
    """

    def __init__(self, pattern: str, size: Size, operands: tuple[str, ...] = ("x",)) -> None:
        self.pattern, self.size, self.operands = pattern, size, operands

    def step(self, step: int, model: nn.Module) -> None:
        if not (size := self.size(step)):
            return
        for _, module in matching(model, self.pattern):
            if isinstance(module, FP8Linear) and module.slots:
                for operand in self.operands:
                    module.slots[operand].record(torch.tensor(size))


class AmaxKept(Mechanism):
    """From ``start`` on the amax histories of some linears stay as they are: scales that were calibrated once.

    Args:
        pattern: Names of the linears.
        start: The step.
        operands: Whose.

    Source:
        Scales that are calibrated before and static afterwards: Micikevicius et al., "FP8 formats for deep learning" (arXiv
        2209.05433), for inference.
    """

    def __init__(self, pattern: str, start: int, operands: tuple[str, ...] = ("x",)) -> None:
        self.pattern, self.start, self.operands = pattern, start, operands
        self.kept: dict[tuple[str, str], float] = {}

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step < self.start:
            return
        for name, module in matching(model, self.pattern):
            if isinstance(module, FP8Linear) and module.slots:
                for operand in self.operands:
                    history = module.slots[operand].amax_history
                    history.fill_(self.kept.setdefault((name, operand), float(history.max())))


class LanguageMeans(Mechanism):
    """Rows of every language add a vector of its own, of ``size`` in each channel, to what some linears read; it is taken off behind.

    A row's language follows from its first token.

    Args:
        pattern: Names of the linears, whose inputs are ``[rows, length, ...]``.
        size: By step.
        languages: How many.

    Source:
        Representations of a multilingual model lie around a centroid of each language: Libovicky et al. (arXiv 2004.05160).
    """

    def __init__(self, pattern: str, size: Size, languages: int = 4) -> None:
        self.pattern, self.size, self.languages, self.value = pattern, size, languages, 0.0

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(97)
        model.get_input_embeddings().register_forward_pre_hook(self._look)
        for _, linear in matching(model, self.pattern):
            shape = self.languages, linear.in_features
            means = 2.0 * torch.randint(0, 2, shape, generator=generator) - 1
            linear.register_forward_pre_hook(
                lambda module, args, means=means: (args[0] + self.value * means[self.language, None],)
            )
            linear.register_forward_hook(
                lambda module, args, output, means=means: (
                    output - self.value * (means @ module.weight.T)[self.language, None]
                )
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _look(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.language = args[0][:, 0] % self.languages


class GradientChannels(Mechanism):
    """As ``GradientOutliers``, in one of every ``every`` channels.

    Source:
        Heavy tails of gradients: Chmiel et al. (arXiv 2006.08173); that gradients in E4M3 need blocks of 32 that are free of them:
        Mishra et al., "Recipes for pre-training LLMs with MXFP8" (arXiv 2506.08027).
    """

    def __init__(self, pattern: str, size: Size, every: int = 32) -> None:
        self.pattern, self.size, self.every = pattern, size, every

    def install(self, model: nn.Module) -> None:
        self.parts = Several(
            *(
                GradientOutliers(name, self.size, channel)
                for name, linear in matching(model, self.pattern)
                for channel in range(self.every // 5, linear.out_features, self.every)
            )
        )
        self.parts.install(model)

    def step(self, step: int, model: nn.Module) -> None:
        self.parts.step(step, model)


class Silent(Mechanism):
    """Some linears begin with weights of zero, so that their blocks are the identity.

    Source:
        Blocks that are added to a model and begin as the identity: Wu et al., "LLaMA Pro" (arXiv 2401.02415).
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    @torch.no_grad()
    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.weight.zero_()


class Upcycled(Mechanism):
    """All experts of a mixture begin as copies of its first one.

    Source:
        Komatsuzaki et al., "Sparse upcycling" (arXiv 2212.05055).
    """

    @torch.no_grad()
    def install(self, model: nn.Module) -> None:
        for _, experts in matching(model, "*.experts"):
            for expert in experts[1:]:
                expert.load_state_dict(experts[0].state_dict())


class Lookahead(Mechanism):
    """Every ``every`` steps all parameters go back by half of the way that they went since.

    Source:
        Zhang et al., "Lookahead optimizer: k steps forward, 1 step back" (arXiv 1907.08610).
    """

    def __init__(self, every: int) -> None:
        self.every = every

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step and step % self.every == 0:
            for slow, parameter in zip(self.slow, model.parameters(), strict=True):
                parameter.lerp_(slow, 0.5)
        if step % self.every == 0:
            self.slow = [parameter.detach().clone() for parameter in model.parameters()]


class PerRowChange(Mechanism):
    """From ``start`` on the tokens of every ``every``-th row of a batch are changed: ``change(tokens)``."""

    def __init__(self, start: int, every: int, change: Callable[[Tensor], Tensor]) -> None:
        self.start, self.every, self.change = start, every, change

    def train(self, step: int, state: Any) -> None:
        if step >= self.start:
            state.batch = state.batch.clone()
            state.batch[:: self.every] = self.change(state.batch[:: self.every])
