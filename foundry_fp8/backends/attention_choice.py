"""The backend of FP8 attention under ``backend: auto``: Transformer Engine where it can run it, else the native kernels."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.attention import (
    AttentionBackend,
    AttentionRecipe,
    FP8DotProductAttention,
    GradScores,
)
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.backend import Availability
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["AttentionWithFallback"]

log = logging.getLogger(__name__)

_RAN = "_attention_ran"  # attribute of a module: the backend of its latest forward


class AttentionWithFallback(AttentionBackend):
    """Uses one backend until it refuses a call, then another for the whole model, so that kernels do not change with every batch.

    Both have the same delayed-scaling state. A resumed run starts with the first again.

    Args:
        first: The preferred backend.
        second: The backend that takes over.

    Attributes:
        note: Why the second took over; empty before.
    """

    name: ClassVar[str] = "auto"

    def __init__(self, first: AttentionBackend, second: AttentionBackend) -> None:
        self.first = first
        self.second = second
        self.note = ""

    def recipe_reason(self, recipe: Recipe, grad_scores: GradScores = "fp8") -> str | None:
        """Why neither can run ``recipe``, or ``None``. One is enough: the second takes over where the first cannot."""
        reasons = [b.recipe_reason(recipe, grad_scores) for b in (self.first, self.second)]
        return None if None in reasons else "; ".join(filter(None, reasons))

    def module_reason(self, recipe: AttentionRecipe, head_dim: int | None) -> str | None:
        """Why neither can run such a module, or ``None``. If only the second can, it takes over the model."""
        reasons = [b.module_reason(recipe, head_dim) for b in (self.first, self.second)]
        if reasons[0] is not None and reasons[1] is None:
            self.turn(reasons[0])
        return None if None in reasons else "; ".join(filter(None, reasons))

    def self_check(self, *args: Any) -> None:
        """Check both, as either may run."""
        for backend in (self.first, self.second):
            backend.self_check(*args)

    def call_reason(
        self,
        module: FP8DotProductAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        dropout_p: float,
    ) -> Availability:
        """Whether the second can run the call, which runs whatever the first refuses."""
        return self.second.call_reason(module, q, k, v, mask, dropout_p)

    def attend(
        self,
        module: FP8DotProductAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        **options: Any,
    ) -> Tensor:
        """See :meth:`AttentionBackend.attend`."""
        runner: AttentionBackend = self._runner(module, q, k, v, mask, options["dropout_p"])
        return runner.attend(module, q, k, v, mask=mask, **options)

    @torch.compiler.disable
    def _runner(
        self,
        module: FP8DotProductAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        dropout_p: float,
    ) -> AttentionBackend:
        ran: AttentionBackend | None = module.__dict__.get(_RAN)
        if ran is not None and inside_backward():  # a recompute must use the backend of its forward
            return ran
        if not self.note:
            assert module.recipe is not None
            refused = self.first.recipe_reason(module.recipe, module.grad_scores)
            refused = refused or self.first.call_reason(module, q, k, v, mask, dropout_p).reason
            if refused:
                self.turn(refused, module.fqn)
        module.__dict__[_RAN] = self.second if self.note else self.first
        return module.__dict__[_RAN]  # type: ignore[no-any-return]

    def turn(self, reason: str, where: str = "") -> None:
        """Switch to the second, once; ``reason`` and ``where`` (the name of the attention) are for the log."""
        if not self.note:
            self.note = f"through {self.second.name}, as {self.first.name} refused: {reason}"
            log.warning(
                "algorithms.fp8.attention: FP8 attention runs %s%s.",
                self.note,
                f" (first at {where})" if where else "",
            )
