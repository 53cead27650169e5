"""The options of ``algorithms.unit_scaling``: apart from :mod:`foundry_fp8.models.mus`, whose models need transformers."""

from __future__ import annotations

import dataclasses

from foundry_fp8.config import Config, Positive

__all__ = ["KEY", "UnitScalingConfig"]

KEY = "algorithms.unit_scaling"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitScalingConfig(Config):
    """The YAML under ``algorithms.unit_scaling``."""

    key = KEY

    base_width: Positive | None = None
    """The width at which the optimizer's learning rate was found; required."""
