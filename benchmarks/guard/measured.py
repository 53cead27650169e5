"""``recipe: measured`` on labelled runs that diverge in one recipe: its loss beside high precision's, and what it left in FP8.

    python benchmarks/guard/measured.py 40 massive_first_token super_weight token_gradients > measured.json

The first argument: how many steps after the cause begins the choice is made, in high precision until then. It sees what is there at that
time; these causes grow with each step. Beside the guard there is another choice where the guard acts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from typing import Any

import torch
from cases import CASES
from train import train

LAST, ERROR = 20, 0.2


def row(name: str, after: int) -> dict[str, Any]:
    """Mean losses of the last steps, as shares of high precision's, and the share of the linears in FP8 at the end."""
    case = next(case for case in CASES if case.name == name)
    measured = {"name": "measured", "error": ERROR, "warmup": case.onset + after, "rows": 8}
    runs = {
        "high precision": train(case, "high"),
        "its recipe": train(case, "fp8"),
        "measured": train(dataclasses.replace(case, recipe=measured), "fp8"),
        "measured and guarded": train(dataclasses.replace(case, recipe=measured), "guarded"),
    }
    losses = {how: statistics.fmean(run.losses[-LAST:]) for how, run in runs.items()}
    own = losses["high precision"]
    return {
        "case": name,
        "recipe": case.recipe,
        "warmup": measured["warmup"],
        "loss": own,
        "above": {how: (loss / own - 1 if math.isfinite(loss) else None) for how, loss in losses.items()},
        "in_fp8": {how: run.linears_in_fp8[-1] for how, run in runs.items() if run.linears_in_fp8},
    }


def main() -> None:
    torch.set_num_threads(1)
    after, *names = sys.argv[1:]
    rows = [row(name, int(after)) for name in names]
    print(
        json.dumps({"torch": torch.__version__, "error": ERROR, "after": int(after), "rows": rows}, indent=2)
    )


if __name__ == "__main__":
    main()
