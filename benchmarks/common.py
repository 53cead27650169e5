"""What the benchmark scripts share: interleaved timing, environment, results as a table and as JSON."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each case by ``clock``, run in turn (a b c a b c ...), so that a drift of the machine hits all alike."""
    for case in cases.values():
        for _ in range(warmup):
            case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            start = clock()
            case()
            seconds[name].append(clock() - start)
    return seconds


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, as CUDA's caching allocator does.

    By default it returns the top of the heap to the system and faults it in again, page by page, whenever a case's tensors
    happen to lie there: up to a quarter of a block's time on a CPU, on this case or on that one.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        libc.mallopt(mmap_threshold, 32 * 2**20)  # the most it takes
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 256 * 2**20)


def median_ratio(a: list[float], b: list[float]) -> float:
    """The median of a's times over b's, pair by pair."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def environment() -> dict[str, Any]:
    """Device, versions, load and date of a measurement."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    found = {
        "date": datetime.date.today().isoformat(),
        "cpu": f"{cpu}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def save(name: str, result: dict[str, Any]) -> None:
    """Write ``results/NAME.json`` and print it as the last line."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
