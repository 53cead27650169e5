"""MFU of a run, step by step, in any loop."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foundry_fp8.compat.compiled_model import is_compiled
from foundry_fp8.config import Config, Positive, from_mapping
from foundry_fp8.gpus import TABLE, Peaks, peaks_of
from foundry_fp8.layers.state import FP8State
from foundry_fp8.observe.flops.gemms import gemms_of, uncounted_matrices
from foundry_fp8.observe.flops.meter import FlopMeter, Tokens
from foundry_fp8.observe.flops.observer import Observer
from foundry_fp8.observe.flops.peaks import PeakFlops, measured_peaks, peaks_from_user
from foundry_fp8.observe.flops.utilisation import Flops, utilisation

__all__ = ["MFUConfig", "MFUMeter", "name_uncounted"]

log = logging.getLogger(__name__)

KEY = "callbacks.mfu_monitor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MFUConfig(Config):
    """The options of the meter in every trainer."""

    key = KEY

    interval: Positive = 10
    """Logs follow the second batch and every batch whose number it divides; each covers the batches since the one before."""
    peak_flops: Literal["auto", "measured"] | PeakFlops = "auto"
    """``auto``: the table of datasheet figures; ``measured``: time a large GEMM at start; or dense FLOP/s of one device:
    ``{bf16: 989.4e12, fp8: 1978.9e12}``, or one number for bf16."""


def name_uncounted(model: nn.Module) -> None:
    """Warn of what will not be counted. Before FSDP, which hides the shapes."""
    missing = uncounted_matrices(model, gemms_of(model))
    if missing:
        said = "%s: %d matrices are not counted (%s, ...), so MFU is too low by their share."
        log.warning(said, KEY, len(missing), missing[0])


class MFUMeter:
    """What part of the device the model's FLOPs use, each GEMM over the peak of the precision it ran in.

    Call :meth:`begin` before the first forward of a step and :meth:`step` when it is done. The first step (warm-up, compilation) is left
    out. All is of this rank's device, without a collective.

    Args:
        model: As it is trained; converted or not, wrapped or not.
        device: What it runs on; by default where its parameters are.
        high_precision: What layers run in that nobody observed: ``bf16``, ``fp16`` or ``fp32``.
        guarded: Wraps each hook (:meth:`foundry_fp8.callbacks.base.Monitor.guarded`).
        **options: The fields of :class:`MFUConfig`.

    Attributes:
        peaks: What the device could do; ``None`` where that is not known, and there is no MFU.
        total: FLOPs of all steps but the first that were logged.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device | None = None,
        high_precision: str = "fp32",
        guarded: Callable[[Callable[..., None]], Callable[..., None]] = lambda hook: hook,
        **options: Any,
    ) -> None:
        self.config: MFUConfig = from_mapping(MFUConfig, options, KEY)
        self.model = model
        self.flops = FlopMeter(model)
        self.total = Flops()
        where = device or next((p.device for p in model.parameters()), torch.device("cpu"))
        self.peaks = self._find_peaks(where, FP8State.of(model))
        self._high_precision, self._guarded = high_precision, guarded
        self._observer: Observer | None = None
        self._hfu = True
        self._tokens = Tokens()
        self._mark: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._paused: tuple[float, tuple[Counter[str], Counter[str]]] | None = None
        self._seconds = self._began = self._seconds_paused = 0.0
        self._logged = False
        self._steps: int | None = None
        """Since the last log; ``None`` until the first is over."""
        self._number = 0

    def facts(self) -> dict[str, Any]:
        """The peaks and where they are from."""
        if self.peaks is None:
            return {}
        found = {f"mfu/peak_{p}": value / 1e12 for p, value in self.peaks.flops_per_sec.items()}
        return {"mfu/peak_source": self.peaks.source, "mfu/peak_detail": self.peaks.detail} | found

    def begin(self) -> None:
        """A step begins; the first is watched."""
        if self._steps is None and self._observer is None:
            self._hfu = not is_compiled(self.model)
            if self._hfu:
                self._observer = Observer(self.flops.to_watch(), self._guarded)
                self._observer.attach()
            else:
                log.info(
                    "%s: the model is compiled, so what is recomputed cannot be seen; mfu/hfu is not logged, and what tensor "
                    "parallelism shards is counted whole.",
                    KEY,
                )

    def step(self, batch: Any, seconds: float, number: int | None = None) -> dict[str, float]:
        """A step is done.

        Args:
            batch: What this rank computed in it: ``input_ids`` ``[batch, sequence]``, a mapping with them (and with ``attention_mask``,
                if there is padding), or several of either.
            seconds: That it took.
            number: Steps finished, this one included; by default counted here.

        Returns:
            What to log: empty but after the second step and every ``interval``.

        Raises:
            ValueError: The batch does not say how many tokens it has.
        """
        parts = batch if isinstance(batch, Sequence) else [batch]
        for part in parts:
            self.flops.take_batch({"input_ids": part} if isinstance(part, Tensor) else part, self._tokens)
        self._number = self._number + 1 if number is None else number
        if self._steps is None:
            self.detach()
            self.flops.settle(self._observer.observed if self._observer else {}, self._high_precision)
            self._mark, self._tokens, self._steps = self.flops.read_ledgers(), Tokens(), 0
            self._began, self._seconds_paused = time.perf_counter(), 0.0
            return {}
        self._steps += 1
        self._seconds += seconds
        if self._logged and self._number % self.config.interval:
            return {}
        return self.rest()

    def rest(self) -> dict[str, float]:
        """What to log of the steps since the last log; empty if there were none."""
        if not self._steps:
            return {}
        ledgers = self.flops.read_ledgers()
        model, again = (end - start for end, start in zip(ledgers, self._mark, strict=True))
        flops = self.flops.static_flops(self._tokens) + Flops({**model}, {**again})
        self.total = self.total + flops
        metrics = self._metrics(flops, time.perf_counter())
        self._mark, self._tokens, self._steps = ledgers, Tokens(), 0
        self._seconds, self._logged = 0.0, True
        return metrics

    def pause(self) -> None:
        """What runs from now on (evaluation) is neither training time nor training FLOPs."""
        self._paused = time.perf_counter(), self.flops.read_ledgers()

    def go_on(self) -> None:
        """Leave out what ran since :meth:`pause`."""
        if self._paused is None:
            return
        (began, before), self._paused = self._paused, None
        self._seconds_paused += time.perf_counter() - began
        if self._steps is not None:
            for mark, end, start in zip(self._mark, self.flops.read_ledgers(), before, strict=True):
                mark.update(end - start)

    def detach(self) -> None:
        """Remove the first step's hooks."""
        if self._observer is not None:
            self._observer.detach()

    def _metrics(self, flops: Flops, now: float) -> dict[str, float]:
        seconds = self._seconds
        metrics = {
            "mfu/tflops_per_device": flops.total / seconds / 1e12,
            "mfu/tokens_per_sec_per_device": self._tokens.computed / seconds,
            "mfu/tokens_nonpad_per_sec_per_device": float(self._tokens.real) / seconds,
            "mfu/fp8_flop_fraction": flops.model.get("fp8", 0.0) / flops.total,
            "mfu/fp4_flop_fraction": flops.model.get("fp4", 0.0) / flops.total,
            "mfu/attention_flop_fraction": flops.attention / flops.total,
        }
        if self.peaks is None:
            return metrics
        try:
            ratios = utilisation(flops, seconds, self.peaks)
            total = utilisation(self.total, now - self._began - self._seconds_paused, self.peaks)
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
