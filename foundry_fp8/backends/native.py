"""The native backend: Triton and ``torch._scaled_mm``. Not written yet; its availability says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from foundry_fp8.backends.base import Availability, Backend
from foundry_fp8.recipes import Recipe

if TYPE_CHECKING:
    from foundry_fp8.modules.linear import FP8Linear

__all__ = ["NativeBackend"]


class NativeBackend(Backend):
    """Will run FP8 on CUDA with torch and Triton alone."""

    name: ClassVar[str] = "native"

    def availability(self, recipe: Recipe, device: torch.device) -> Availability:
        """Never, until it is written."""
        return Availability(False, "it is not written yet", "Use transformer_engine or emulated.")

    def linear(self, module: FP8Linear, x: Tensor) -> Tensor:
        """Unreachable while :meth:`availability` says no."""
        raise RuntimeError(f"{module.fqn}: the native backend is not written yet")
