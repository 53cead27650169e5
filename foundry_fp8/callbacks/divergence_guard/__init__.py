"""Measures what FP8 does to the loss and the gradients, and demotes the layers that do too much to them."""

from foundry_fp8.callbacks.divergence_guard.callback import DivergenceGuard, DivergenceGuardConfig

__all__ = ["DivergenceGuard", "DivergenceGuardConfig"]
