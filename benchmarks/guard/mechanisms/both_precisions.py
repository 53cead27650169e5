"""What makes high precision diverge too."""

from __future__ import annotations

from typing import Any

import torch
from mechanisms.base import Mechanism, Sized, matching
from torch import Tensor, nn


class Multiplied(Mechanism):
    """Weights are multiplied by ``rate`` in every step from ``start`` on, as output logits that grow (arXiv 2309.14322)."""

    def __init__(self, pattern: str, rate: float, start: int) -> None:
        self.pattern, self.rate, self.start = pattern, rate, start

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step >= self.start:
            for _, module in matching(model, self.pattern):
                module.weight.mul_(self.rate)


class TokensAlike(Sized):
    """What blocks put out is mixed with its mean over the tokens so far, by the share ``size`` (arXiv 2103.03404)."""

    def install(self, model: nn.Module) -> None:
        for _, block in matching(model, self.pattern):
            block.register_forward_hook(self._mix)

    def _mix(self, module: nn.Module, args: Any, output: Any) -> Any:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        mean = hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None]
        mixed = hidden + self.value * (mean - hidden)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed
