"""Sees a run going wrong in its layers before the loss does, and acts."""

from foundry_fp8.callbacks.divergence_guard.callback import DivergenceGuard
from foundry_fp8.callbacks.divergence_guard.config import DivergenceGuardConfig

__all__ = ["DivergenceGuard", "DivergenceGuardConfig"]
