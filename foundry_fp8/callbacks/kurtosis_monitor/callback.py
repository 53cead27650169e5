"""The Composer callback ``kurtosis_monitor``."""

from __future__ import annotations

import dataclasses

from composer.core import State
from composer.loggers import Logger
from torch import nn

from foundry_fp8.callbacks.base import Monitor, model_of
from foundry_fp8.observe.kurtosis_meter import KurtosisConfig, KurtosisMeter

__all__ = ["KurtosisMonitor", "KurtosisMonitorConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KurtosisMonitorConfig(KurtosisConfig):
    """The YAML under ``callbacks.kurtosis_monitor``."""

    details: bool = False
    """Send to every logger what only the run log holds otherwise: means, every layer, and the variant per sample."""


class KurtosisMonitor(Monitor):
    """Runs :class:`~foundry_fp8.observe.kurtosis_meter.KurtosisMeter` in a trainer.

    Args:
        **options: The fields of :class:`KurtosisMonitorConfig`.
    """

    key = "kurtosis_monitor"
    config_class = KurtosisMonitorConfig

    def init(self, state: State, logger: Logger) -> None:
        """Check the patterns before anything is spent."""
        self._make(model_of(state))

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the modules as they are now: algorithms may have replaced some since."""
        self.meter = self._make(model_of(state))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Take the hooks away and log."""
        if self.meter is not None:
            metrics, details = self.meter.end()
            if details:
                self.log(logger, metrics, details)

    def _make(self, model: nn.Module) -> KurtosisMeter:
        return KurtosisMeter(model, guarded=self.guarded, **self.meter_options)
