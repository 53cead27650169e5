"""Practice of healthy runs that no earlier half has: made for the eighth half."""

from __future__ import annotations

from typing import Any

import torch
from mechanisms.base import Mechanism
from torch import nn


class SwitchEma(Mechanism):
    """Every ``every`` steps all parameters become the exponential moving average of what they were.

    Args:
        every: How many steps.
        decay: Of the average, in every step.

    Source:
        Li et al., "Switch EMA" (arXiv 2402.09240).
    """

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


class Boilerplate(Mechanism):
    """The last rows of every batch are those of the first one: the same documents again and again.

    Source:
        Documents that a corpus has thousands of times: Lee et al., "Deduplicating training data makes language models better"
        (arXiv 2107.06499).
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def train(self, step: int, state: Any) -> None:
        if not step:
            self.known = state.batch[-self.rows :].clone()
        state.batch = torch.cat([state.batch[: -self.rows], self.known])


class ShortDocuments(Mechanism):
    """A row is several short documents of different lengths, of which each but the last one ends with the token 0.

    Args:
        lengths: Of the shortest document and of the longest one, without their ends.
    """

    def __init__(self, lengths: tuple[int, int]) -> None:
        self.lengths = lengths
        self.generator = torch.Generator().manual_seed(101)

    def train(self, step: int, state: Any) -> None:
        state.batch = state.batch.clone()
        low, high = self.lengths
        for row in state.batch:
            at = int(torch.randint(low, high + 1, (), generator=self.generator))
            while at < len(row):
                row[at] = 0
                at += 1 + int(torch.randint(low, high + 1, (), generator=self.generator))
