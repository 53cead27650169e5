"""What the GPU benchmarks share: shapes, timing with CUDA events, the machine's own ceilings, the table.

Without a CUDA device the scripts still run with ``--smoke``, on tiny tensors under Triton's interpreter: that proves the
scripts, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

SMOKE = "--smoke" in sys.argv
if SMOKE:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

import torch  # noqa: E402
from common import environment, save  # noqa: E402

DEVICE = "cpu" if SMOKE else "cuda"
TOLERANCE = 0.2 if SMOKE else 0.0
"""Bytes that may differ from the reference: on a GPU none; the interpreter's own casts round ties the other way."""

# (name, in_features, out_features)
LINEARS = {
    "llama3-8b": (("wq, wo", 4096, 4096), ("wk, wv", 4096, 1024), ("gate, up", 4096, 14336), ("down", 14336, 4096)),
    "mpt-7b": (("Wqkv", 4096, 12288), ("out_proj", 4096, 4096), ("up_proj", 4096, 16384), ("down_proj", 16384, 4096)),
    "mpt-1b": (("Wqkv", 2048, 6144), ("out_proj", 2048, 2048), ("up_proj", 2048, 8192), ("down_proj", 8192, 2048)),
    "fog-1.5b": (("Wqkv", 2048, 4096), ("out_proj", 2048, 2048), ("up_proj", 2048, 12288), ("down_proj", 12288, 2048)),
}  # fmt: skip
SMOKE_LINEARS = {"smoke": (("square", 64, 64), ("ragged", 48, 80))}

# Dense vendor peaks, FLOP/s: bf16, fp8 (NVIDIA data sheets; the sparse figures are twice these).
PEAKS = {"H100 80GB HBM3": (989.5e12, 1979e12), "H200": (989.5e12, 1979e12), "H100 PCIe": (756e12, 1513e12)}


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds: the median, and the distance between the quartiles as a share of it."""

    seconds: float
    spread: float


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options that every script takes."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--smoke", action="store_true", help="tiny tensors, no GPU; proves the script only")
    found.add_argument("--repeats", type=int, default=30)
    found.add_argument("--models", nargs="*", default=None, help=f"of {', '.join(LINEARS)}")
    found.add_argument("--tokens", type=int, default=33 if SMOKE else 8192)
    found.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    return found


def linears(models: Sequence[str] | None) -> list[tuple[str, int, int]]:
    """(label, in_features, out_features) of the chosen models."""
    table = SMOKE_LINEARS if SMOKE else LINEARS
    return [(f"{m} {name}", k, n) for m in (models or table) for name, k, n in table[m]]


def require_device() -> None:
    """Stop with a reason where nothing can be measured."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here. Use --smoke to try the script; it measures nothing.")


def prepared(
    models: Iterable[tuple[str, Callable[[], torch.nn.Module]]],
    step_of: Callable[[torch.nn.Module], Callable[[], None]],
    warmup: int = 1,
) -> tuple[dict[str, Callable[[], None]], dict[str, float], dict[str, str]]:
    """Steps that run, the GiB that one takes at its peak beside what is there (on a GPU), and why the others do not run.

    Args:
        models: Names, and what makes the model.
        step_of: A model's step.
        warmup: Steps before the one whose memory counts.
    """
    cases: dict[str, Callable[[], None]] = {}
    memory: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, build in models:
        try:
            step = step_of(build())
            for _ in range(warmup):
                step()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                step()
                memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
        except (
            Exception
        ) as error:  # out of memory, or a library that fails, must not cost the others' figures
            if SMOKE:
                raise
            failed[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        cases[name] = step
    return cases, memory, failed


def timed(cases: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Time]:
    """Each case in turn, ``repeats`` rounds, L2 overwritten before each; medians of the device's own clock."""
    for case in cases.values():
        for _ in range(1 if SMOKE else 3):
            case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    flush = torch.empty(1 if SMOKE else 256 << 20, dtype=torch.uint8, device=DEVICE)
    for _ in range(2 if SMOKE else repeats):
        for name, case in cases.items():
            flush.zero_()
            seconds[name].append(_once(case))
    return {name: _summary(values) for name, values in seconds.items()}


def _once(case: Callable[[], Any]) -> float:
    if DEVICE == "cpu":
        start = time.perf_counter()
        case()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    case()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _summary(values: list[float]) -> Time:
    middle = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4)
    return Time(middle, (high - low) / middle)


def ceilings(repeats: int) -> dict[str, float]:
    """What this machine reaches today: copy bytes/s (read + written), BF16 and FP8 GEMM FLOP/s on random data."""
    size = 64 if SMOKE else 8192
    source = torch.randn(size, size, device=DEVICE).bfloat16()
    big = torch.empty((1 << 10) if SMOKE else (1 << 30), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(big)
    other = torch.randn(size, size, device=DEVICE).bfloat16()
    cases = {"copy": lambda: target.copy_(big), "bf16": lambda: source @ other}
    if DEVICE == "cuda":
        a, b = source.to(torch.float8_e4m3fn), other.to(torch.float8_e4m3fn)
        one = torch.ones((), device=DEVICE)
        cases["fp8"] = lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    found = timed(cases, repeats)
    rates = {"copy_bytes_per_s": 2 * big.numel() / found["copy"].seconds}
    for name in ("bf16", "fp8"):
        if name in found:
            rates[f"{name}_flops"] = 2 * size**3 / found[name].seconds
    return rates


def machine() -> dict[str, Any]:
    """The environment, with what matters on a GPU."""
    found = environment()
    import triton

    found |= {"triton": triton.__version__, "cuda": torch.version.cuda, "smoke": SMOKE}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["sms"], found["memory_gib"] = properties.multi_processor_count, properties.total_memory >> 30
    return found


def peaks(name: str | None) -> tuple[float, float] | None:
    """Vendor peaks (bf16, fp8) of a GPU by its name; ``None`` for one that is not in the table."""
    return next((value for key, value in PEAKS.items() if name and key in name), None)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as aligned columns."""
    if not rows:
        return "(nothing ran)"
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns] + [[_cell(row.get(c, "")) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def finish(name: str | None, result: dict[str, Any]) -> None:
    """Print the rows, and the JSON as the last line; write it where asked."""
    print(table(result["rows"]))
    if name:
        save(name, result)
    else:
        print(json.dumps(result))
