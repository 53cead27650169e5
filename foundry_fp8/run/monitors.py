"""MFU, kurtosis and FP8 health, for a run whose trainer is not Composer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from foundry_fp8.config import check_choice, from_mapping
from foundry_fp8.observe.flops.mfu import MFUConfig, MFUMeter
from foundry_fp8.observe.health_meter import HealthConfig, HealthMeter
from foundry_fp8.observe.kurtosis_meter import KurtosisConfig, KurtosisMeter
from foundry_fp8.observe.switched_off import SwitchesOff

__all__ = ["MONITORS", "Monitors"]

MONITORS: Mapping[str, Any] = {"mfu": MFUConfig, "kurtosis": KurtosisConfig, "health": HealthConfig}
"""The names, and what their options are."""


class _Monitor(SwitchesOff):
    """One that was asked for, with its meter."""

    def __init__(self, name: str, model: nn.Module, options: Mapping[str, Any], **of_mfu: Any) -> None:
        self.name = name
        kinds: dict[str, Any] = {"mfu": MFUMeter, "kurtosis": KurtosisMeter, "health": HealthMeter}
        more = of_mfu if name == "mfu" else {}
        self.meter = kinds[name](model, guarded=self.guarded, **more, **options)

    def detach(self) -> None:
        """Take its hooks out of the model."""
        self.meter.detach()


class Monitors:
    """Those that were asked for. What fails in one switches it off, with one logged error, and training goes on.

    Raises:
        ConfigError: An unknown name or option.
    """

    def __init__(self, options: Mapping[str, Mapping[str, Any]], key: str) -> None:
        for name, own in options.items():
            check_choice(key, name, tuple(MONITORS))
            from_mapping(MONITORS[name], dict(own), f"{key}.{name}")
        self.options = {name: dict(own) for name, own in options.items()}
        self._monitors: dict[str, _Monitor] = {}
        self._batches: list[dict[str, Any]] = []
        self._began = 0.0
        self._evaluated = False

    @property
    def running(self) -> dict[str, Any]:
        """The meters of those that have not failed, by name."""
        return {name: one.meter for name, one in self._monitors.items() if one.failed is None}

    def start(self, model: nn.Module, *, device: torch.device, high_precision: str) -> None:
        """Training begins; what the options ask for and ``model`` lacks raises ``ConfigError``."""
        of_mfu = {"device": device, "high_precision": high_precision}
        self._monitors = {name: _Monitor(name, model, own, **of_mfu) for name, own in self.options.items()}

    def begin(self, finished: int) -> None:
        """A step begins, after so many."""
        if "mfu" in self.running and self._evaluated:
            self.running["mfu"].go_on()
        self._evaluated = False
        self._batches, self._began = [], time.perf_counter()
        for name, one in self._monitors.items():
            one.guarded(one.meter.begin)(*([] if name == "mfu" else [finished]))

    def see(self, inputs: dict[str, Any]) -> None:
        """A training forward of the model, with these arguments."""
        if "mfu" in self.running:
            self._batches.append(inputs)

    def end(self, finished: int) -> dict[str, float]:
        """A step is over, the ``finished``-th; what to log."""
        found: dict[str, float] = {}

        def mfu(meter: MFUMeter) -> None:
            found.update(meter.step(self._batches, time.perf_counter() - self._began, finished))
            meter.pause()  # of no effect if no evaluation comes

        def kurtosis(meter: KurtosisMeter) -> None:
            found.update(meter.end()[0])

        def health(meter: HealthMeter) -> None:
            report = meter.end(finished)
            found.update(report.metrics if report else {})

        ends: dict[str, Any] = {"mfu": mfu, "kurtosis": kurtosis, "health": health}
        for name, one in self._monitors.items():
            one.guarded(ends[name])(one.meter)
        self._batches = []
        return found

    def after_evaluation(self) -> None:
        """What ran since the last step was an evaluation, and is not training."""
        self._evaluated = True

    def detach(self) -> None:
        """Take every hook out of the model."""
        for one in self._monitors.values():
            one.detach()
