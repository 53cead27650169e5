"""The YAML under ``callbacks.divergence_guard``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

from foundry_fp8.callbacks.run_log import RunPath
from foundry_fp8.config import Config, Positive, not_empty, one_of
from foundry_fp8.numerics.recipes import FOR_ANY_MODEL

__all__ = ["KEY", "DivergenceGuardConfig"]

KEY = "callbacks.divergence_guard"

FINER = tuple(name for name in FOR_ANY_MODEL if name != "delayed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergenceGuardConfig(Config):
    """The YAML under ``callbacks.divergence_guard``."""

    key = KEY

    interval: Positive = 10
    """Batches between two observations; where one of them is in doubt, the next batch is looked at too. In the batches between
    one linear in turn is looked at, and the amaxes that delayed scaling has anyway are compared with its histories."""
    actions: Annotated[Sequence[Literal["warn", "checkpoint", "demote", "stop"]], not_empty] = ("demote",)
    """What an alarm does besides being logged: ``warn`` (nothing more), ``checkpoint``, ``demote`` (and renew amax histories),
    ``stop``; several."""
    finer: Annotated[str, one_of("auto", *FINER)] | None = "auto"
    """The rung between the configured recipe and high precision: a recipe's name, ``auto`` (current after delayed, block
    after current), or null to go straight to high precision."""
    quiet_batches: Positive = 200
    """Batches for which the shadow of a demoted layer has to be healthy before it is promoted by one rung. Doubles for a
    layer each time it has to be demoted again."""
    checkpoint_folder: RunPath = "divergence_guard"
    """Where ``checkpoint`` saves: ``ba<batch>-rank<rank>.pt``, under this folder and the run's name."""
    details: bool = False
    """Send to every logger what only the run log holds otherwise: the worst of each signal, and each layer's rung."""
