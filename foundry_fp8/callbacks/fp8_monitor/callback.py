"""The Composer callback ``fp8_monitor``."""

from __future__ import annotations

import dataclasses

from composer.core import State
from composer.loggers import Logger

from foundry_fp8.callbacks.base import Monitor, model_of
from foundry_fp8.observe.health_meter import HealthConfig, HealthMeter

__all__ = ["FP8Monitor", "FP8MonitorConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8MonitorConfig(HealthConfig):
    """The YAML under ``callbacks.fp8_monitor``."""

    details: bool = False
    """Send to every logger what only the run log holds otherwise: means, ages of scales, the worst figure of every transformer block."""


class FP8Monitor(Monitor):
    """Runs :class:`~foundry_fp8.observe.health_meter.HealthMeter` in a trainer.

    Args:
        **options: The fields of :class:`FP8MonitorConfig`.
    """

    key = "fp8_monitor"
    config_class = FP8MonitorConfig

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the converted linears."""
        self.meter = HealthMeter(model_of(state), guarded=self.guarded, **self.meter_options)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log what was measured."""
        batch = state.timestamp.batch.value
        found = None if self.meter is None else self.meter.end(batch)
        if found is not None:
            self.log(logger, found.metrics, found.details)
            if self.config.worst:
                logger.log_table(list(found.COLUMNS), found.worst, "fp8_worst", batch)
