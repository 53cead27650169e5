"""Chooses by measured step time how gradients are sent: quantised (``coded``), in bfloat16, or in their own dtype.

On a fast network quantising may cost more time than it saves. So after the warm-up each way runs for a few batches and all
ranks take the fastest. This is measured again every few hundred batches.
"""

from __future__ import annotations

import logging
import statistics
import time

import torch
import torch.distributed as dist

from foundry_fp8.distributed.attendance import Attendance
from foundry_fp8.distributed.compressed_group import WAYS, Way
from foundry_fp8.distributed.compression.config import KEY
from foundry_fp8.distributed.traffic import Traffic

__all__ = ["Adaptation"]

START = 20
"""Batches after the warm-up before the first measurement: kernels are compiled, and the allocator has what it needs."""
BATCHES = 5
"""Batches of each way in a measurement. The first is not counted: it still finishes work of the way before."""
AGAIN = 500
"""Batches from one measurement to the next."""
TIE = 0.01
"""Share of a step's time by which a way must be faster to be chosen over one that rounds less."""

log = logging.getLogger(__name__)


class Adaptation:
    """Measures steps and decides, the same on every rank.

    Attributes:
        way: What was decided last; ``coded`` before the first decision.
        verdict: The last decision as text, with its measurements; empty before the first.
    """

    def __init__(self, gradients: str, warmup: int, traffic: Traffic) -> None:
        self.gradients = gradients
        self.first = warmup + START
        self.traffic = traffic
        self.way: Way = "coded"
        self.verdict = ""
        self._times: dict[Way, list[float]] = {}
        self._wire: dict[Way, float] = {}
        self._quantize = 0.0
        self._attendance = Attendance(f"{KEY}.adapt")
        self._before: tuple[int, float, int, float] | None = None  # batch, time, bytes, quantise seconds

    def start_batch(self, batch: int, device: torch.device) -> tuple[Way, bool]:
        """Take the time of the batch before, and choose how the gradients of ``batch`` are sent.

        Call it on every rank, with the same numbers: the decision is a collective.

        Args:
            batch: Its number. A jump of this number cancels a running measurement.
            device: Of the parameters; synchronised while a measurement runs.

        Returns:
            The way, and whether a decision was made just now.
        """
        offset = batch - self.first
        phase = offset % AGAIN if offset >= 0 else AGAIN
        if phase > len(WAYS) * BATCHES:
            self._before = None
            return self.way, False
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.traffic.settle()
        now = time.perf_counter()
        sent, quantize = self.traffic.wire_bytes, self.traffic.seconds["quantize"]
        if phase == 0:
            self._times, self._wire = {}, {}
        elif self._before is not None and self._before[0] == batch - 1:
            _, then, bytes_then, quantize_then = self._before
            measured = WAYS[(phase - 1) // BATCHES]
            self._times.setdefault(measured, []).append(now - then)
            self._wire[measured] = sent - bytes_then
            if measured == "coded":
                self._quantize = quantize - quantize_then
        self._before = (batch, now, sent, quantize)
        if phase < len(WAYS) * BATCHES:
            return WAYS[phase // BATCHES], False
        complete = all(len(self._times.get(way, [])) == BATCHES for way in WAYS)
        if complete:
            self._attendance.when = f", batch {batch}"
            self._decide(device)
        return self.way, complete

    def _decide(self, device: torch.device) -> None:
        """Choose the way whose slowest rank is fastest; of those within ``TIE`` the one that rounds least."""
        seconds = torch.tensor(
            [statistics.median(self._times[way][1:]) for way in WAYS], dtype=torch.float32, device=device
        )
        self._attendance.say()
        self._attendance.all_reduce(seconds, dist.ReduceOp.MAX)
        taken = dict(zip(WAYS, seconds.tolist(), strict=True))
        least = min(taken.values())
        self.way = next(way for way in reversed(WAYS) if taken[way] <= least * (1 + TIE))
        saved = self._wire["plain"] - self._wire["coded"]
        break_even = (
            f"; break-even near {8e-9 * saved / self._quantize:.2g} Gbit/s a rank" if self._quantize else ""
        )
        chosen = {"coded": self.gradients, "bf16": "bfloat16", "plain": "their own dtype"}[self.way]
        self.verdict = (
            f"{KEY}: gradients travel in {chosen}. A step takes {1e3 * taken['coded']:.1f} ms with {self.gradients}, "
            f"{1e3 * taken['bf16']:.1f} in bfloat16, {1e3 * taken['plain']:.1f} uncompressed{break_even}"
        )
        log.info("%s", self.verdict)
