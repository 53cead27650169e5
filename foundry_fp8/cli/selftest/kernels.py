"""A stage of ``selftest``: the native kernels of every recipe that this machine can run, against their definitions, and how fast they are.

python -m foundry_fp8.cli.selftest.kernels
"""

from __future__ import annotations

import functools
import json
import sys
import time

import torch

from foundry_fp8.backends.native import NativeBackend
from foundry_fp8.backends.native.plan import Layout, plan_of
from foundry_fp8.backends.native.scaling import SCALINGS
from foundry_fp8.backends.native.source import BOTH, Source
from foundry_fp8.backends.size_rule import bytes_per_element
from foundry_fp8.compat.block_scaled_mm import block_mode_missing
from foundry_fp8.kernels.launch import interpreting
from foundry_fp8.numerics.recipes import RECIPES, BlockScaling, CurrentScaling, Gemm, Operand, Recipe
from foundry_fp8.observe.flops.peaks import shortest

__all__ = ["main", "measured_rates"]

GEMMS: tuple[tuple[Gemm, Operand, Operand], ...] = (
    ("fprop", "x", "w"),
    ("dgrad", "dy", "w"),
    ("wgrad", "dy", "x"),
)


def main() -> int:
    """Check, and print a JSON object; the exit status is 1 if anything is wrong."""
    from foundry_fp8.backends.native.self_check import check_kernels

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows, ran = [], False
    for name, recipe in RECIPES.items():
        here = NativeBackend().availability(recipe(), device)
        ok, figures = True, f"cannot run here: {here.reason}"
        if here.ok:
            ran, started = True, time.perf_counter()
            try:
                check_kernels(recipe(), torch.bfloat16, device, True)
                figures = f"right, {time.perf_counter() - started:.2f} s"
            except Exception as error:  # what one recipe's kernels raise must not hide the others'
                ok, figures = False, f"wrong, {type(error).__name__}: {error}"
            if interpreting():  # its float8 casts are not the hardware's (docs/kernels.md)
                ok, figures = True, "interpreted"
        rows.append({"check": name, "ok": ok, "figures": figures})
    if not ran:
        rows.append(
            {"check": "native backend", "ok": device.type == "cpu", "figures": "it runs no recipe here"}
        )
    wrong = not all(row["ok"] for row in rows)
    timed = device.type == "cuda" and ran and not wrong
    rates = {"gpu": torch.cuda.get_device_name(device), **measured_rates(device)} if timed else None
    print(json.dumps({"rows": rows, "rates": rates}))
    return int(wrong)


def measured_rates(device: torch.device, size: int = 8192, seconds: float = 0.2) -> dict[str, float]:
    """Of :class:`~foundry_fp8.backends.size_rule.Rates`, those that ``device`` reaches with operands of ``size`` x ``size``."""
    x, flops = torch.randn(size, size, device=device).bfloat16(), 2 * size**3

    def cast(recipe: Recipe, operand: Operand) -> Layout:
        plan = plan_of(recipe)
        quantize = SCALINGS[plan.kind].quantize
        return quantize(Source(x), operand, plan, BOTH, (None, None, None), direct=False)[0]

    def product(recipe: Recipe) -> float:
        plan, took = plan_of(recipe), 0.0
        for which, a, b in GEMMS:
            given = which, cast(recipe, a), cast(recipe, b), plan, (size, size, x.dtype)
            took += shortest(functools.partial(SCALINGS[plan.kind].multiply, *given, direct=False), seconds)
        return flops * len(GEMMS) / took

    current, block = CurrentScaling(), BlockScaling()
    found = {"bf16": flops / shortest(lambda: x @ x, seconds), "fp8": product(current)}
    moved = bytes_per_element(current) * x.numel()
    found["bandwidth"] = moved / shortest(lambda: cast(current, "x"), seconds)
    if NativeBackend().availability(block, device).ok:
        found["triton_block" if block_mode_missing() else "block"] = product(block)
    return found


if __name__ == "__main__":
    sys.exit(main())
