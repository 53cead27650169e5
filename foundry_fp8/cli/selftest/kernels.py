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

    device, found = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"), {}
    for name, recipe in RECIPES.items():
        here = NativeBackend().availability(recipe(), device)
        if not here.ok:
            found[name] = {"state": "cannot run here", "why": here.reason}
            continue
        started = time.perf_counter()
        try:
            check_kernels(recipe(), torch.bfloat16, device, True)
            found[name] = {"state": "right", "why": ""}
        except Exception as error:  # what one recipe's kernels raise must not hide the others'
            found[name] = {"state": "wrong", "why": f"{type(error).__name__}: {error}"}
        if interpreting():  # its float8 casts are not the hardware's (docs/kernels.md)
            found[name]["state"] = "interpreted"
        found[name]["seconds"] = str(round(time.perf_counter() - started, 2))
    print(json.dumps({"recipes": found}))
    return int(any(entry["state"] == "wrong" for entry in found.values()))


if __name__ == "__main__":
    sys.exit(main())
