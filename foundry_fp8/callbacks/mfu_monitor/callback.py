"""The Composer callback ``mfu_monitor``."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from typing import Any, Literal

import torch
from composer.core import State
from composer.loggers import Logger

from foundry_fp8.callbacks.base import Monitor, model_of
from foundry_fp8.callbacks.step_clock import StepClock
from foundry_fp8.compat.compiled_model import is_compiled
from foundry_fp8.compat.composer_device import device_of
from foundry_fp8.config import Config, Positive
from foundry_fp8.layers.state import FP8State
from foundry_fp8.observe.flops import (
    Flops,
    Peaks,
    gemms_of,
    measured_peaks,
    peaks_of,
    uncounted_matrices,
    utilisation,
)
from foundry_fp8.observe.flops.meter import FlopMeter, Tokens
from foundry_fp8.observe.flops.observer import Observer
from foundry_fp8.observe.flops.peaks import TABLE, PeakFlops, peaks_from_user

__all__ = ["MFUMonitor", "MFUMonitorConfig"]

log = logging.getLogger(__name__)

KEY = "callbacks.mfu_monitor"

DETAILS = frozenset({
    "mfu/speedup_cap", "mfu/bf16_equivalent", "mfu/fp8_flop_fraction", "mfu/attention_flop_fraction",
    "mfu/tokens_nonpad_per_sec_per_device",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MFUMonitorConfig(Config):
    """The YAML under ``callbacks.mfu_monitor``."""

    key = KEY

    interval: Positive = 10
    """Logs follow the second batch and every batch whose number it divides; each covers the batches since the one before."""
    peak_flops: Literal["auto", "measured"] | PeakFlops = "auto"
    """``auto``: the table of datasheet figures; ``measured``: time a large GEMM at start; or dense FLOP/s of one device:
    ``{bf16: 989.4e12, fp8: 1978.9e12}``, or one number for bf16."""
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
    """

    key = "mfu_monitor"

    def __init__(self, **options: Any) -> None:
        super().__init__(MFUMonitorConfig, options)
        self.peaks: Peaks | None = None
        self.meter: FlopMeter | None = None
        self._observer: Observer | None = None
        self._hfu = True
        self._tokens = Tokens()
        self._total = Flops()
        self._ledger_mark: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._ledger_eval: tuple[Counter[str], Counter[str]] | None = None
        self._clock = StepClock()
        self._fit_began = self._eval_began = 0.0
        self._seconds_in_eval = 0.0
        self._logged = False
        self._batches: int | None = None
        """Batches since the last log; ``None`` until the first batch is over."""

    def detach(self) -> None:
        """Remove the first batch's hooks."""
        if self._observer is not None:
            self._observer.detach()

    def init(self, state: State, logger: Logger) -> None:
        """Name what will not be counted, before FSDP hides the shapes."""
        missing = uncounted_matrices(state.model, gemms_of(state.model))
        if missing:
            log.warning(
                "%s: %d matrices are not counted (%s, ...), so MFU is too low by their share.",
                KEY,
                len(missing),
                missing[0],
            )

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the peaks and the shapes."""
        self.meter = FlopMeter(model_of(state))
        self.peaks = self._find_peaks(device_of(state), FP8State.of(state.model))
        if self.peaks is not None:
            found = {f"mfu/peak_{p}": value / 1e12 for p, value in self.peaks.flops_per_sec.items()}
            logger.log_hyperparameters(
                {"mfu/peak_source": self.peaks.source, "mfu/peak_detail": self.peaks.detail} | found
            )
        self._batches, self._tokens, self._total = None, Tokens(), Flops()
        self._clock, self._logged = StepClock(), False

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """A step begins with waiting for its data."""
        self._clock.begin()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Count the batch; watch the first one."""
        assert self.meter is not None
        self.meter.take_batch(state.batch, self._tokens)
        if self._batches is None and self._observer is None:
            self._hfu = not is_compiled(state.model)
            if self._hfu:
                self._observer = Observer(self.meter.to_watch(), self.guarded)
                self._observer.attach()
            else:
                log.info(
                    "%s: the model is compiled, so what is recomputed cannot be seen; mfu/hfu is not logged.",
                    KEY,
                )

    def batch_end(self, state: State, logger: Logger) -> None:
        """Close the batch; log the second, and then every ``interval``."""
        assert self.meter is not None
        self._clock.end()
        now = time.perf_counter()
        if self._batches is None:
            self.detach()
            self.meter.settle(self._observer.observed if self._observer else {}, _autocast_precision(state))
            self._ledger_mark = self.meter.read_ledgers()
            self._tokens, self._batches, self._fit_began, self._seconds_in_eval = Tokens(), 0, now, 0.0
            self._clock = StepClock()
            return
        self._batches += 1
        if not self._logged or int(state.timestamp.batch) % self.config.interval == 0:
            self._log(logger, now)

    def eval_start(self, state: State, logger: Logger) -> None:
        """Evaluation is neither training time nor training FLOPs."""
        self._eval_began = time.perf_counter()
        if self.meter is not None and self._batches is not None:
            self._ledger_eval = self.meter.read_ledgers()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Leave out what the evaluation added."""
        self._seconds_in_eval += time.perf_counter() - self._eval_began
        if self.meter is not None and self._ledger_eval is not None:
            after = self.meter.read_ledgers()
            for mark, end, start in zip(self._ledger_mark, after, self._ledger_eval, strict=True):
                mark.update(end - start)
            self._ledger_eval = None

    def fit_end(self, state: State, logger: Logger) -> None:
        """Log the rest, if it is a whole batch."""
        if self._batches:
            self._log(logger, time.perf_counter())
        self.detach()

    def _log(self, logger: Logger, now: float) -> None:
        assert self.meter is not None
        ledgers = self.meter.read_ledgers()
        model, again = (end - start for end, start in zip(ledgers, self._ledger_mark, strict=True))
        flops = self.meter.static_flops(self._tokens) + Flops({**model}, {**again})
        self._total = self._total + flops
        metrics = self._metrics(flops, now)
        self.log(
            logger,
            {key: value for key, value in metrics.items() if key not in DETAILS},
            {key: value for key, value in metrics.items() if key in DETAILS},
        )
        self._ledger_mark, self._tokens, self._batches = ledgers, Tokens(), 0
        self._clock, self._logged = StepClock(), True

    def _metrics(self, flops: Flops, now: float) -> dict[str, float]:
        seconds = self._clock.seconds
        metrics = {
            "mfu/tflops_per_device": flops.total / seconds / 1e12,
            "mfu/tokens_per_sec_per_device": self._tokens.computed / seconds,
            "mfu/tokens_nonpad_per_sec_per_device": float(self._tokens.real) / seconds,
            "mfu/fp8_flop_fraction": flops.model.get("fp8", 0.0) / flops.total,
            "mfu/attention_flop_fraction": flops.attention / flops.total,
        }
        if self.peaks is None:
            return metrics
        try:
            ratios = utilisation(flops, seconds, self.peaks)
            total = utilisation(self._total, now - self._fit_began - self._seconds_in_eval, self.peaks)
        except KeyError as error:
            log.warning("%s: no MFU. %s", KEY, error.args[0])
            self.peaks = None
            return metrics
        if not self._hfu:
            del ratios["hfu"]
        metrics |= {f"mfu/{name}": value for name, value in ratios.items()}
        metrics["mfu/mfu_end_to_end"] = total["mfu"]
        return metrics

    def _find_peaks(self, device: torch.device, converted: FP8State | None) -> Peaks | None:
        asked = self.config.peak_flops
        if isinstance(asked, str) and converted is not None and converted.backend.name == "emulated":
            log.warning(
                "%s: FP8 is emulated here, so no MFU is logged (tokens/s and TFLOP/s are): no peak of this device is that of "
                "what it computes. To count against peaks of your own: `%s: {peak_flops: {fp8: 2.0e14, bf16: 1.0e14}}`.",
                KEY, KEY.rpartition(".")[2],
            )  # fmt: skip
            return None
        if asked == "measured":
            return measured_peaks(device)
        if asked != "auto":
            return peaks_from_user(asked)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        peaks = peaks_of(name)
        if peaks is None:
            log.warning(
                "%s: no peak is known for %r, so no MFU is logged (tokens/s and TFLOP/s are). Give one: `%s: {peak_flops: "
                "{bf16: 1.0e14, fp8: 2.0e14}}` (dense FLOP/s of one device), or `peak_flops: measured`. Known: %s.",
                KEY, name, KEY.rpartition(".")[2], ", ".join(row.name for row in TABLE),
            )  # fmt: skip
        return peaks


def _autocast_precision(state: State) -> str:
    """What layers that nobody observed run in: the trainer's autocast (their own record would say more)."""
    name = state.precision.value.removeprefix("amp_")
    return name if name in ("bf16", "fp16") else "fp32"
