"""Peaks that the table of :mod:`foundry_fp8.gpus` does not have: given by the user, or measured here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import torch
from torch.utils.benchmark import Timer

from foundry_fp8.config import PositiveNumber, not_empty, one_of
from foundry_fp8.gpus import PRECISIONS, Peaks
from foundry_fp8.numerics.formats import E4M3

__all__ = ["PeakFlops", "measured_peaks", "peaks_from_user", "shortest"]

PeakFlops = (
    PositiveNumber | Annotated[Mapping[Annotated[str, one_of(*PRECISIONS)], PositiveNumber], not_empty]
)
"""Dense FLOP/s of one device: one number for bf16, or by precision."""


def peaks_from_user(given: float | Mapping[str, float]) -> Peaks:
    """Peaks as a YAML gives them: a mapping of precision to FLOP/s, or one number for bf16."""
    peaks = given if isinstance(given, Mapping) else {"bf16": given}
    return Peaks({name: float(number) for name, number in peaks.items()}, "user", "given by the user")


def measured_peaks(device: torch.device, size: int | None = None, seconds: float = 0.25) -> Peaks:
    """Time one large square GEMM in each precision that ``device`` runs.

    A measured peak is what one large GEMM reaches here, below the datasheet, so the utilisation it gives is not comparable
    with one from the table. Where there is no FP8 GEMM, fp8 and fp4 get the fp32
    figure: emulated FP8 multiplies in fp32.

    Args:
        device: Where to run.
        size: M = N = K; 8192 on an accelerator, 1024 on a CPU.
        seconds: Time to spend on each precision, after one warm-up.
    """
    size = size or (1024 if device.type == "cpu" else 8192)
    peaks: dict[str, float] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if device.type == "cpu" and name == "fp16":
            continue
        a = torch.randn(size, size, dtype=torch.float32, device=device).to(dtype)
        peaks[name] = 2.0 * size**3 / shortest(lambda a=a: a @ a, seconds)  # type: ignore[misc]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        a8 = torch.randn(size, size, dtype=torch.float32, device=device).to(E4M3.dtype)
        one = torch.ones((), dtype=torch.float32, device=device)
        peaks["fp8"] = 2.0 * size**3 / shortest(
            lambda: torch._scaled_mm(a8, a8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True),
            seconds,
        )  # fmt: skip
        fp8 = "fp8 with torch._scaled_mm"
    else:
        peaks["fp8"] = peaks["fp4"] = peaks["fp32"]
        fp8 = "no FP8 GEMM here: fp8 and fp4 are given the fp32 figure, which is what emulation runs"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Peaks(peaks, "measured", f"{name}: {size}^3 GEMMs timed at start; {fp8}")


def shortest(run: Callable[[], object], seconds: float) -> float:
    """The seconds of one ``run``, the least of as many as ``seconds`` hold."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=seconds).times)
