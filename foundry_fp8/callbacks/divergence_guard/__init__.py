"""Sees a run going wrong in its layers before the loss does, and acts."""

from foundry_fp8.callbacks.divergence_guard.divergence_guard import DivergenceGuard, DivergenceGuardConfig
from foundry_fp8.callbacks.divergence_guard.ladder import Ladder, ladders_of
from foundry_fp8.callbacks.divergence_guard.signals import RULES, Rule, Signal

__all__ = ["RULES", "DivergenceGuard", "DivergenceGuardConfig", "Ladder", "Rule", "Signal", "ladders_of"]
