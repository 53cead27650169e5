"""The Transformer Engine backend: real ``te.Linear`` modules that compute for the converted linears."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from foundry_fp8.backends.base import Availability, Backend
from foundry_fp8.recipes import Recipe

if TYPE_CHECKING:
    from foundry_fp8.modules.linear import FP8Linear

__all__ = ["TransformerEngineBackend"]


class TransformerEngineBackend(Backend):
    """Placeholder until the adapter lands."""

    name: ClassVar[str] = "transformer_engine"

    def availability(self, recipe: Recipe, device: torch.device) -> Availability:
        """Never, until it is written."""
        return Availability(False, "its adapter is not written yet", "Use emulated.")

    def linear(self, module: FP8Linear, x: Tensor) -> Tensor:
        """Unreachable while :meth:`availability` says no."""
        raise RuntimeError(f"{module.fqn}: the Transformer Engine adapter is not written yet")
