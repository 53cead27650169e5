"""The Composer callback ``mfu_monitor``."""

from __future__ import annotations

import dataclasses
from typing import Any

from composer.core import State
from composer.loggers import Logger

from foundry_fp8.callbacks.base import Monitor, model_of
from foundry_fp8.callbacks.run_log import log_facts
from foundry_fp8.callbacks.step_clock import StepClock
from foundry_fp8.compat.composer_device import device_of
from foundry_fp8.observe.flops.mfu import MFUConfig, MFUMeter, name_uncounted

__all__ = ["MFUMonitor", "MFUMonitorConfig"]

DETAILS = frozenset({
    "mfu/speedup_cap", "mfu/bf16_equivalent", "mfu/fp8_flop_fraction", "mfu/fp4_flop_fraction",
    "mfu/attention_flop_fraction", "mfu/tokens_nonpad_per_sec_per_device",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MFUMonitorConfig(MFUConfig):
    """The YAML under ``callbacks.mfu_monitor``."""

    details: bool = False
    """Send to every logger what only the run log holds otherwise: what follows from the others or from the model."""


class MFUMonitor(Monitor):
    """Logs what part of the device the model's FLOPs use, each GEMM over the peak of the precision it ran in.

    Everything is of this rank's device (Composer logs rank 0): its own ledgers, its own batches, its own clock. There is
    no collective and no synchronisation of its own; Composer reads the loss at the end of every batch, so the clock is
    that of finished work. The first batch (warm-up, compilation) is left out; evaluation and the saving of checkpoints
    are left out of everything but ``mfu/mfu_end_to_end``, which leaves out only evaluation. Where FP8 is emulated there is
    no MFU unless the peaks are given as numbers: the GEMMs run in another precision than they count in.

    Args:
        **options: The fields of :class:`MFUMonitorConfig`.

    Attributes:
        meter: From the start of training on.
    """

    key = "mfu_monitor"
    config_class = MFUMonitorConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._clock = StepClock()
        self._batch: Any = None

    def init(self, state: State, logger: Logger) -> None:
        """Name what will not be counted, before FSDP hides the shapes."""
        name_uncounted(state.model)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the peaks and the shapes."""
        autocast = state.precision.value.removeprefix("amp_")  # what layers that nobody observed run in
        self.meter = MFUMeter(
            model_of(state),
            device=device_of(state),
            high_precision=autocast if autocast in ("bf16", "fp16") else "fp32",
            guarded=self.guarded,
            **self.meter_options,
        )
        if facts := self.meter.facts():
            log_facts(logger, facts)
        self._clock = StepClock()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """A step begins with waiting for its data."""
        self._clock.begin()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Keep the batch; watch the first one."""
        assert self.meter is not None
        self._batch = state.batch
        self.meter.begin()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Count the batch; log the second, and then every ``interval``."""
        assert self.meter is not None
        self._log(logger, self.meter.step(self._batch, self._clock.end(), int(state.timestamp.batch)))
        self._batch = None

    def eval_start(self, state: State, logger: Logger) -> None:
        """Evaluation is neither training time nor training FLOPs."""
        if self.meter is not None:
            self.meter.pause()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Leave out what the evaluation added."""
        if self.meter is not None:
            self.meter.go_on()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Log the rest, if it is a whole batch."""
        if self.meter is not None:
            self._log(logger, self.meter.rest())
        self.detach()

    def _log(self, logger: Logger, metrics: dict[str, float]) -> None:
        if metrics:
            details = {key: value for key, value in metrics.items() if key in DETAILS}
            self.log(logger, {key: value for key, value in metrics.items() if key not in DETAILS}, details)
