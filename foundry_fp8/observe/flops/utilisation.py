"""MFU and its relatives for a step whose GEMMs ran in several precisions.

With ``F_p`` the model FLOPs that ran in precision ``p`` on one device, ``R_p`` those that activation checkpointing ran
again, ``P_p`` the device's dense peak in ``p``, and ``T`` the seconds that passed::

    ideal             = sum_p F_p / P_p                     seconds at peak
    MFU               = ideal / T                           never above 1 if the peaks are right
    HFU               = (ideal + sum_p R_p / P_p) / T
    effective peak    = F / ideal                           the harmonic mean of the peaks, weighted by FLOPs
    speed-up cap      = (F / P_bf16) / ideal                what this precision mix can gain over all-bf16 at most
    bf16 equivalent   = F / (T P_bf16)                      comparable with old logs; may exceed 1; not an MFU

The arithmetic mean of the peaks is not an attainable rate, and the FP8 peak alone makes the share of bf16 GEMMs look
idle. Because FP8 shortens the ideal time more than the real one, MFU usually falls when FP8 makes a run faster.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from foundry_fp8.gpus import Peaks

__all__ = ["Flops", "utilisation"]


@dataclasses.dataclass
class Flops:
    """FLOPs of one device over some time, by precision.

    Attributes:
        model: What the model needs: fprop, dgrad, wgrad and attention, each counted once.
        recomputed: What activation checkpointing ran again.
        attention: The part of ``model`` that is attention, all precisions together.
    """

    model: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    recomputed: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    attention: float = 0.0

    @property
    def total(self) -> float:
        """Model FLOPs, all precisions together."""
        return float(sum(self.model.values()))

    def __add__(self, other: Flops) -> Flops:
        total = Flops(attention=self.attention + other.attention)
        for flops in (self, other):
            for mine, theirs in ((total.model, flops.model), (total.recomputed, flops.recomputed)):
                for precision, count in theirs.items():
                    mine[precision] += count
        return total


def utilisation(flops: Flops, seconds: float, peaks: Peaks) -> dict[str, float]:
    """The ratios of this module's docstring.

    All three are of one device.

    Returns:
        ``mfu``, ``hfu``, ``effective_peak`` (TFLOP/s), and with a bf16 peak ``speedup_cap`` and ``bf16_equivalent``.

    Raises:
        KeyError: A precision ran for which ``peaks`` has no number.
        ValueError: No FLOPs or no time.
    """
    if not flops.total > 0 or not seconds > 0:
        raise ValueError(f"Nothing to divide: {flops.total:g} FLOPs in {seconds:g} s.")
    ideal = sum(count / peaks.of(precision) for precision, count in flops.model.items())
    again = sum(count / peaks.of(precision) for precision, count in flops.recomputed.items())
    ratios = {
        "mfu": ideal / seconds,
        "hfu": (ideal + again) / seconds,
        "effective_peak": flops.total / ideal / 1e12,
    }
    if "bf16" in peaks.flops_per_sec:  # a V100 has none
        bf16 = flops.total / peaks.of("bf16")
        ratios |= {"speedup_cap": bf16 / ideal, "bf16_equivalent": bf16 / seconds}
    return ratios
