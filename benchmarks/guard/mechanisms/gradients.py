"""What grows in gradients alone: the forward is as it was."""

from __future__ import annotations

from typing import Any

import torch
from mechanisms.base import (
    AddedToGradients,
    Mechanism,
    Size,
    Sized,
    at,
    change_gradient,
    keep,
    matching,
    zero,
)
from torch import Tensor, nn


class GradientOutliers(Sized):
    """The gradient of one output channel of linears grows by ``size``; its weights are zero (arXiv 2006.08173, 2209.05433).

    Gradients of the mean loss are about 1e-4 here.
    """

    def __init__(self, pattern: str, size: Size, channel: int = 6) -> None:
        super().__init__(pattern, size)
        self.channel = channel

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            zero(linear.weight, self.channel)
            if linear.bias is not None:
                keep(linear.bias, self.channel)
            linear.register_forward_hook(self._put)

    def _put(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not self.value or not output.requires_grad:
            return None
        bump = at(self.channel, self.value, output.shape[-1])
        return change_gradient(output, lambda grad: grad + bump)


class TokenGradients(AddedToGradients):
    """The gradients of one token in 50, drawn anew at each linear, have ``size`` in every channel (arXiv 2412.19437, appendix B.2)."""

    def __init__(self, pattern: str, size: Size) -> None:
        super().__init__(pattern, size)
        self.generator = torch.Generator().manual_seed(83)

    def bump(self, output: Tensor) -> Tensor:
        chosen = torch.rand(output.shape[:-1], generator=self.generator) < 0.02
        signs = 2.0 * torch.randint(0, 2, output.shape, generator=self.generator) - 1
        return self.value * chosen[..., None] * signs


class PairedGradients(Mechanism):
    """Rows come in pairs of the same tokens, and the gradients of their logits move by ``size`` in opposite directions (arXiv 2305.18290).

    All of it cancels in the gradient of every parameter, where the two rows are summed; not where each was rounded before.
    """

    def __init__(self, size: Size) -> None:
        self.size, self.value = size, 0.0

    def install(self, model: nn.Module) -> None:
        model.get_output_embeddings().register_forward_hook(self._push)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def train(self, step: int, state: Any) -> None:
        state.batch = state.batch[::2].repeat_interleave(2, 0)

    def _push(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not self.value or not output.requires_grad:
            return None
        sign = 1.0 - 2.0 * (torch.arange(output.shape[0]) % 2)[:, None, None]
        push = torch.randn(output.shape[1:], generator=torch.Generator().manual_seed(59))
        return change_gradient(output, lambda grad, value=self.value: grad + value * sign * push)


class AttentionGradientOutliers(Sized):
    """The gradient of what attention puts out carries ``size`` in one channel of every head; the values' is zero (arXiv 2505.11594).

    The linears around it have the gradients they had.
    """

    def __init__(self, pattern: str, size: Size, channel: int = 3) -> None:
        super().__init__(pattern, size)
        self.channel = channel

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, self.pattern):
            d, heads, kv = attention.head_dim, attention.heads, attention.kv_heads
            values = [(heads + kv + head) * d + self.channel for head in range(kv)]
            weight = attention.qkv_proj.weight
            zero(weight, values)
            clean = torch.ones(weight.shape[0])
            clean[values] = 0.0
            attention.qkv_proj.register_forward_hook(
                lambda module, args, output, clean=clean: change_gradient(output, lambda grad: grad * clean)
            )
            attention.o_proj.register_forward_pre_hook(
                lambda module, args, d=d: (change_gradient(args[0], lambda grad: self._put(grad, d)),)
            )

    def _put(self, grad: Tensor, d: int) -> Tensor:
        return grad + self.value * (torch.arange(grad.shape[-1]) % d == self.channel)
