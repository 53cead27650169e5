"""What is added to an operand and taken off again behind the GEMM, and what is multiplied and divided again: made for the fourth half.

Unlike an outlier, an offset leaves the shape of an operand's histogram narrow: all of its elements grow together, and what told them apart
falls below the last bit of the mantissa, under any recipe. High precision has bits to spare.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, Size, change_gradient, matching
from torch import Tensor, nn


class ActivationMean(Mechanism):
    """All that some linears read moves by ``size`` in every channel; what it adds is taken off behind the GEMM, with its gradient.

    Source:
        Activations that are not centred, and a shift of each channel that the next layer makes up for: Wei et al., "Outlier
        Suppression+" (arXiv 2304.09145). RMSNorm does not centre: Zhang and Sennrich (arXiv 1910.07467).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(lambda module, args: (args[0] + self.value,))
            linear.register_forward_hook(
                lambda module, args, output: output - self.value * module.weight.sum(1)
            )

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)


class RankOne(Mechanism):
    """Weights of some linears are added ``size`` times the product of two vectors of signs; what that adds is taken off again.

    Args:
        pattern: Names of the linears.
        size: By step.
        mean: The vectors are ones: the mean of the weights grows, and not another direction.

    Source:
        One singular value that grows until it is all there is of a weight: Zhai et al., "Stabilizing Transformer training by preventing
        attention entropy collapse" (arXiv 2303.06296); weights' mean: Qiao et al., "Weight standardization" (arXiv 1903.10520).
    """

    def __init__(self, pattern: str, size: Size, *, mean: bool = False) -> None:
        self.pattern, self.size, self.mean, self.value = pattern, size, mean, 0.0

    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(23)
        self.vectors: dict[str, tuple[Tensor, Tensor]] = {}
        for name, linear in matching(model, self.pattern):
            left, right = (
                torch.ones(n) if self.mean else 2.0 * torch.randint(0, 2, (n,), generator=generator) - 1
                for n in linear.weight.shape
            )
            self.vectors[name] = left, right
            linear.register_forward_hook(
                lambda module, args, output, left=left, right=right: (
                    output - self.value * (args[0] @ right)[..., None] * left
                )
            )

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        before, self.value = self.value, self.size(step)
        if self.value != before:
            for name, linear in matching(model, self.pattern):
                linear.weight += (self.value - before) * torch.outer(*self.vectors[name])


class GradientMean(Mechanism):
    """The gradient of all that some linears put out moves by ``size``; what it adds to other gradients is taken off again.

    A second product of the same operands, in high precision and worth nothing, gets the gradient ``-size``.

    Source:
        Gradients that are not centred: Yong et al., "Gradient centralization" (arXiv 2004.01461).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_hook(self._move)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _move(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self.value or not output.requires_grad:
            return None
        value = self.value
        again = change_gradient(F.linear(args[0], module.weight), lambda grad: torch.full_like(grad, -value))
        return change_gradient(output, lambda grad: grad + value) + (again - again.detach())


class ValueMean(Mechanism):
    """All values of attention move by ``size``; as probabilities sum to one, so does what attention puts out, and it is taken off there.

    Source:
        Values' means, which are taken off before they are quantised: Zhang et al., "SageAttention2" (arXiv 2411.10958).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            first = (attention.heads + attention.kv_heads) * attention.head_dim
            attention.qkv_proj.register_forward_hook(
                lambda module, args, output, first=first: (
                    output + self.value * (torch.arange(output.shape[-1]) >= first)
                )
            )
            attention.o_proj.register_forward_pre_hook(lambda module, args: (args[0] - self.value,))

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)


class Spread(Mechanism):
    """Tokens are multiplied by between 1 and ``size`` in front of some linears (even in the logarithm), and divided behind them.

    Args:
        pattern: Names of the linears.
        size: By step; below 1 counts as 1.
        cycle: All tokens of a microbatch are alike, and so many microbatches follow each other, from the least to the largest.

    Source:
        Tokens whose norms differ by magnitudes, for which activations are quantised token by token: Yao et al., "ZeroQuant" (arXiv
        2206.01861).
    """

    def __init__(self, pattern: str, size: Size, *, cycle: int | None = None) -> None:
        self.pattern, self.size, self.cycle, self.value = pattern, size, cycle, 1.0
        self.calls: dict[int, int] = {}
        self.generator = torch.Generator().manual_seed(29)
        self.factors: dict[int, Tensor] = {}

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(self._multiply)
            linear.register_forward_hook(lambda module, args, output: output / self.factors[id(module)])

    def step(self, step: int, model: nn.Module) -> None:
        self.value = max(1.0, self.size(step))

    def _multiply(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        shape = args[0].shape[:-1]
        if self.cycle is not None:
            self.calls[id(module)] = calls = self.calls.get(id(module), -1) + 1
            part = torch.full(shape, calls % self.cycle / (self.cycle - 1))
        else:
            part = torch.rand(shape, generator=self.generator)
        self.factors[id(module)] = factor = (self.value**part)[..., None]
        return (args[0] * factor,)


def _first(output: Any, changed: Tensor) -> Any:
    return (changed, *output[1:]) if isinstance(output, tuple) else changed


class TokensAlike(Mechanism):
    """What blocks put out is mixed with its mean over the tokens so far, by the share ``size``; high precision feels it too.

    Source:
        Dong et al., "Attention is not all you need: pure attention loses rank" (arXiv 2103.03404).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        for _, block in matching(model, self.pattern):
            block.register_forward_hook(self._mix)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _mix(self, module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        mean = hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None]
        return _first(output, hidden + self.value * (mean - hidden))


class UnitsDie(Mechanism):
    """``size`` is taken off all that some linears put out in front of a ReLU, so that units die; high precision feels it too.

    Source:
        Lu et al., "Dying ReLU and initialization" (arXiv 1903.06733).
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_hook(lambda module, args, output: output - self.value)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)


class Sheared(Mechanism):
    """Half of what some linears read is added ``size`` times the other half; their weights are changed so that the product stays.

    What told the halves apart is a small difference of two large numbers, in the activations and in the weights. The weights are not
    trained from there on, so that no optimizer has to cope.

    Source:
        Equivalent affine transformations of activations and weights: Ma et al., "AffineQuant" (arXiv 2403.12544), which seeks those
        that help and must keep them well conditioned.
    """

    def __init__(self, pattern: str, size: Size) -> None:
        self.pattern, self.size, self.value = pattern, size, 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.weight.register_hook(lambda grad: torch.zeros_like(grad) if self.value else grad)
            linear.register_forward_pre_hook(self._shear)

    def _shear(self, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        first, second = args[0].chunk(2, -1)
        return (torch.cat([first + self.value * second, second], -1),)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        before, self.value = self.value, self.size(step)
        for _, linear in matching(model, self.pattern):
            half = linear.in_features // 2
            linear.weight[:, half:] -= (self.value - before) * linear.weight[:, :half]
