"""What damages the amax histories of delayed scaling."""

from __future__ import annotations

from typing import Any

import torch
from mechanisms.base import Mechanism, Size, Sized, at, keep, matching
from torch import Tensor, nn

from foundry_fp8.layers.linear import FP8Linear


class CompensatedBias(Sized):
    """All tokens carry ``size`` in one input channel of linears; what it adds is taken off again behind the GEMM.

    Delayed scaling clips what has grown since the last step. That column of the weight is not trained.
    """

    def __init__(self, pattern: str, size: Size, channel: int) -> None:
        super().__init__(pattern, size)
        self.channel = channel

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            keep(linear.weight, (slice(None), self.channel))
            linear.register_forward_pre_hook(
                lambda module, args: (args[0] + at(self.channel, self.value, args[0].shape[-1]),)
            )
            linear.register_forward_hook(self._take_off)

    def _take_off(self, module: Any, args: Any, output: Tensor) -> Tensor:
        return output - self.value * module.weight[:, self.channel].detach()


class StaleHistory(Mechanism):
    """At one step amax histories of activations and gradients become ``factor`` times what they are: FP8 state of another run."""

    def __init__(self, pattern: str, step: int, factor: float) -> None:
        self.pattern, self.at, self.factor = pattern, step, factor

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step != self.at:
            return
        for _, module in matching(model, self.pattern):
            if isinstance(module, FP8Linear) and module.slots:
                for operand in ("x", "dy"):
                    history = module.slots[operand].amax_history
                    history.fill_(float(history.max()) * self.factor)
