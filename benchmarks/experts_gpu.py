"""The experts of one layer in one parameter, forward and backward: BF16 one by one and grouped, FP8 one by one and grouped.

    python benchmarks/experts_gpu.py [--repeats 30] [--save experts_h100_2026-11-26]

Rows are sorted by expert already; experts get equal shares, or shares that differ up to eightfold ("uneven"). "bf16 grouped" is torch's
grouped GEMM, the faster of the two in BF16 is what "speedup" is over. FP8 is ``current``, its casts included. "TFLOPS" counts the three
GEMMs. Needs torch 2.8 or later for "bf16 grouped".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_common import DEVICE, SMOKE, finish, machine, parser, require_device, timed
from torch import Tensor

from foundry_fp8.backends.native import NativeBackend, grouped
from foundry_fp8.layers.grouped_linear import FP8GroupedLinear, by_expert
from foundry_fp8.numerics.recipes import CurrentScaling

LAYERS = {
    "mixtral-8x7b up": (8, 14336, 4096),
    "dbrx up": (16, 10752, 6144),
    "deepseek-moe-16b up": (64, 1408, 2048),
    "qwen3-30b-a3b up": (128, 768, 2048),
}
"""Experts, out_features, in_features."""
if SMOKE:
    LAYERS = {"smoke": (4, 96, 64)}


def shares(rows: int, experts: int, uneven: bool) -> list[int]:
    """Rows of each expert."""
    weights = [1.0 + 7.0 * e / (experts - 1) if uneven else 1.0 for e in range(experts)]
    sizes = [int(rows * weight / sum(weights)) for weight in weights]
    return [*sizes[:-1], rows - sum(sizes[:-1])]


def cases(experts: int, n: int, k: int, sizes: list[int]) -> dict[str, Callable[[], Any]]:
    """Name -> forward and backward."""
    x = torch.randn(sum(sizes), k, device=DEVICE).bfloat16().requires_grad_()
    weights = (torch.randn(experts, n, k, device=DEVICE) * 0.02).bfloat16().requires_grad_()
    dy = (torch.randn(sum(sizes), n, device=DEVICE) * 1e-3).bfloat16()
    ends = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    layer = FP8GroupedLinear(
        fqn="experts",
        shape=(experts, n, k),
        backend=NativeBackend(),
        recipe=CurrentScaling(),
        wgrad="fp8",
        evaluate="high_precision",
    )
    fits = grouped.fits_grouped

    def step(forward: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            x.grad = weights.grad = None
            forward().backward(dy)

        return run

    def one_by_one() -> Tensor:
        grouped.fits_grouped = lambda *given: False
        try:
            return layer(x, weights, sizes)
        finally:
            grouped.fits_grouped = fits

    found = {"bf16 one by one": step(lambda: by_expert(torch.nn.functional.linear, x, weights, sizes))}
    if hasattr(torch, "_grouped_mm") and DEVICE == "cuda":
        found["bf16 grouped"] = step(lambda: torch._grouped_mm(x, weights.transpose(1, 2), offs=ends))
    found["fp8 one by one"] = step(one_by_one)
    found["fp8 grouped"] = step(lambda: layer(x, weights, sizes))
    return found


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    options = arguments.parse_args()
    require_device()
    rows: list[dict[str, Any]] = []
    tokens = 64 if SMOKE else 2 * options.tokens
    for name, (experts, n, k) in LAYERS.items():
        for uneven in (False, True):
            sizes = shares(tokens, experts, uneven)
            found = timed(cases(experts, n, k, sizes), options.repeats)
            base = min(time.seconds for variant, time in found.items() if variant.startswith("bf16"))
            for variant, time in found.items():
                rows.append(
                    {
                        "group": f"{name}, {experts} experts{', uneven' if uneven else ''}",
                        "variant": variant,
                        "ms": time.seconds * 1e3,
                        "TFLOPS": 6.0 * tokens * n * k / time.seconds / 1e12,
                        "speedup": base / time.seconds,
                        "spread": time.spread,
                    }
                )
    finish(options.save, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
