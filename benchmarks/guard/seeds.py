"""How much of a result is the seed's: some tuned cases at seeds of their own.

    python benchmarks/guard/seeds.py --labels   8 cases at 2 more seeds each in high precision, and in FP8 without the guard
    python benchmarks/guard/seeds.py            under the guard

Prints a line a run and stores ``results/guard_seeds.json``. The label is judged again for each seed: a case that another seed turns into
something else is not a robust one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import warnings
from typing import Any

import judge
import run
import torch
import tuned
from case import Case
from common import RESULTS, environment

CASES = (
    "swiglu_alignment", "key_outliers", "super_weight", "stale_history",
    "harder_data", "high_rate", "mixture", "lasting_outliers",
)  # fmt: skip
SEEDS = (101, 102)
"""Added to a case's own."""
STORED = RESULTS / "guard_seeds.json"
KEPT = (
    "holds", "fp8_above_reference", "departure", "lead_steps", "guarded_above_high", "alarms", "false_alarms",
    "demotions", "false_demotions", "promotions_while_sick",
)  # fmt: skip


def guarded(case: Case, known: dict[str, Any]) -> dict[str, Any]:
    """How the guard did on one seed of a case, and whether its label holds there."""
    known = {**known, **judge.label(case, *map(run.numbers, known["losses"].values()))}
    told = {**run.row("tuned", case, known, run.guarded(case)), "holds": known["holds"]}
    return {key: told[key] for key in KEPT}


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("composer").setLevel(logging.ERROR)
    logging.getLogger("foundry_fp8").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    labels = "--labels" in sys.argv
    stored = json.loads(STORED.read_text()) if STORED.exists() else {"runs": {}}
    stored["environment"] = environment()
    for case in (case for case in tuned.CASES if case.name in CASES):
        for seed in SEEDS:
            other = dataclasses.replace(case, seed=case.seed + seed)
            entry = stored["runs"].setdefault(f"{case.name}, seed {other.seed}", {})
            if labels:
                entry["label"] = run.finite(run.label(other))
                print(
                    case.name,
                    other.seed,
                    {k: v for k, v in entry["label"].items() if k != "losses"},
                    flush=True,
                )
            else:
                entry["guarded"] = run.finite(guarded(other, entry["label"]))
                print(case.name, other.seed, entry["guarded"], flush=True)
            STORED.write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    main()
