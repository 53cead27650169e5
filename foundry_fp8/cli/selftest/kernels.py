"""A stage of ``selftest``: the native kernels of every recipe that this machine can run, against their definitions.

python -m foundry_fp8.cli.selftest.kernels
"""

from __future__ import annotations

import json
import sys
import time

import torch

from foundry_fp8.backends.native import NativeBackend
from foundry_fp8.kernels.launch import interpreting
from foundry_fp8.numerics.recipes import RECIPES

__all__ = ["main"]


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
    print(json.dumps({"rows": rows}))
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
