"""What `unit` saves on a GPU, predicted: hidden linears of the paper's sizes by the native backend's roofline. Nothing is measured.

    python benchmarks/unit_scaling/predicted.py            results/unit_scaling_predicted.json, and a table

A pass is forward and backward of all hidden linears over 4 x 4096 tokens on one H100: GEMMs at the rates of native/size_rule.py, x and dy
quantised once and w twice at its bandwidth (bfloat16 read, two FP8 layouts written; under current scaling each is read once more for
its amax).
Launch and host time are left out. State is delayed scaling's in float32; collectives are a pass's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import RESULTS

from foundry_fp8.backends.size_rule import BANDWIDTH, BF16_FLOPS, FP8_FLOPS
from foundry_fp8.models.mus import SIZES
from foundry_fp8.numerics.recipes import DelayedScaling

FILE = RESULTS / "unit_scaling_predicted.json"
TOKENS = 4 * 4096
RECIPES = ("unit", "delayed", "current")


def predicted(size: str) -> dict[str, Any]:
    width, layers, _ = SIZES[size]
    linears = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)] * layers  # K, N
    products = sum(6 * TOKENS * k * n for k, n in linears)
    cast = 4 * sum(TOKENS * (k + n) + 2 * k * n for k, n in linears)
    measured = 2 * sum(TOKENS * (k + n) + k * n for k, n in linears)
    tensors = 3 * len(linears)
    found: dict[str, Any] = {"size": size, "linears": len(linears), "bf16 ms": 1e3 * products / BF16_FLOPS}
    for recipe in RECIPES:
        moved = cast + (measured if recipe == "current" else 0)
        seconds = products / FP8_FLOPS + moved / BANDWIDTH
        delayed = recipe == "delayed"
        found[recipe] = {
            "ms": 1e3 * seconds,
            "times bf16": products / BF16_FLOPS / seconds,
            "GB quantising moves": moved / 1e9,
            "state KB": 4 * tensors * (1 + DelayedScaling().amax_history_len) / 1e3 if delayed else 0,
            "all-reduces": int(delayed),
            "amaxes": 0 if recipe == "unit" else tensors,
        }
    return found


def main() -> None:
    rows = [predicted(size) for size in SIZES]
    FILE.write_text(json.dumps(rows, indent=1) + "\n")
    print("| size | linears | unit | delayed | current | amaxes a pass | delayed's state |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        speeds = " | ".join(
            f"{row[r]['times bf16']:.2f}x, {row[r]['GB quantising moves']:.0f} GB" for r in RECIPES
        )
        print(f"| {row['size']} | {row['linears']} | {speeds} | 0, {row['delayed']['amaxes']}, {row['current']['amaxes']} | {row['delayed']['state KB']:.0f} KB |")  # fmt: skip


if __name__ == "__main__":
    main()
