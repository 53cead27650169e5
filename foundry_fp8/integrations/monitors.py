"""MFU, kurtosis and FP8 health for a trainer that is not Composer."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from foundry_fp8.config import check_choice, from_mapping
from foundry_fp8.observe.flops.mfu import MFUConfig, MFUMeter
from foundry_fp8.observe.health_meter import HealthConfig, HealthMeter
from foundry_fp8.observe.kurtosis_meter import KurtosisConfig, KurtosisMeter

__all__ = ["MONITORS", "Monitors"]

log = logging.getLogger(__name__)

MONITORS: Mapping[str, Any] = {"mfu": MFUConfig, "kurtosis": KurtosisConfig, "health": HealthConfig}
"""The names, and what their options are."""


class Monitors:
    """Those that were asked for. What fails in one switches it off, with one logged error, and training goes on.

    Args:
        options: By name (:data:`MONITORS`).

    Raises:
        ConfigError: An unknown name or option.
    """

    def __init__(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        for name, own in options.items():
            check_choice("FP8Callback.monitors", name, tuple(MONITORS))
            from_mapping(MONITORS[name], dict(own), f"FP8Callback.monitors.{name}")
        self.options = {name: dict(own) for name, own in options.items()}
        self.running: dict[str, Any] = {}
        self._batches: list[dict[str, Any]] = []
        self._began = 0.0
        self._evaluated = False

    def start(self, model: nn.Module, *, device: torch.device, high_precision: str) -> None:
        """Training begins; what the options ask for and ``model`` lacks raises ``ConfigError``."""
        kinds: dict[str, Any] = {
            "mfu": functools.partial(MFUMeter, device=device, high_precision=high_precision),
            "kurtosis": KurtosisMeter,
            "health": HealthMeter,
        }
        self.running = {
            name: kinds[name](model, guarded=self._guarded(name), **own) for name, own in self.options.items()
        }

    def begin(self, finished: int) -> None:
        """A step begins, after so many."""
        if "mfu" in self.running and self._evaluated:
            self.running["mfu"].go_on()
        self._evaluated = False
        self._batches, self._began = [], time.perf_counter()
        for name, meter in list(self.running.items()):
            self._guarded(name)(meter.begin)(*([] if name == "mfu" else [finished]))

    def see(self, inputs: dict[str, Any]) -> None:
        """A training forward of the model, with these arguments."""
        if "mfu" in self.running:
            self._batches.append(inputs)

    def end(self, finished: int) -> dict[str, float]:
        """A step is over, the ``finished``-th; what to log."""
        found: dict[str, float] = {}

        def mfu() -> None:
            seconds = time.perf_counter() - self._began
            found.update(self.running["mfu"].step(self._batches, seconds, finished))
            self.running["mfu"].pause()  # of no effect if no evaluation comes

        def kurtosis() -> None:
            found.update(self.running["kurtosis"].end()[0])

        def health() -> None:
            report = self.running["health"].end(finished)
            found.update(report.metrics if report else {})

        ends = {"mfu": mfu, "kurtosis": kurtosis, "health": health}
        for name in list(self.running):
            self._guarded(name)(ends[name])()
        self._batches = []
        return found

    def after_evaluation(self) -> None:
        """What ran since the last step was an evaluation, and is not training."""
        self._evaluated = True

    def detach(self) -> None:
        """Take every hook out of the model."""
        for meter in self.running.values():
            meter.detach()

    def _guarded(self, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        def wrap(function: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(function)
            def hook(*args: Any, **kwargs: Any) -> None:
                if name not in self.running:
                    return
                try:
                    function(*args, **kwargs)
                except Exception as error:
                    meter = self.running.pop(name, None)
                    log.error(
                        "%s failed and is off for the rest of this run; training goes on.",
                        name,
                        exc_info=error,
                    )
                    if meter is not None:
                        meter.detach()

            return hook

        return wrap
