"""How far two runs in high precision lie apart that are equally right: what "within 1 % of high precision" can mean.

    python benchmarks/guard/floor.py                        every case that diverges in FP8 alone
    python benchmarks/guard/floor.py --split held-out       of one half; --only NAME, one case; --resume leaves out what is stored

Each case in high precision again, its initial weights moved by at most what rounding them to bfloat16 would (2^-9 of each, seeds of their
own): same data, same cause, same settings. Stores ``results/guard_floor.json``: by case, each run's final loss over that of the run
that the guard is compared with, minus 1. FP8 rounds everything anew in every step, so these distances are what one run more costs or
wins by chance, whatever a guard did.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import warnings

import judge
import run
import torch
from case import Case
from common import environment
from mechanisms.base import Mechanism, Several
from torch import nn
from train import train

SEEDS = (1, 2, 3)


class Moved(Mechanism):
    """Multiplies every initial weight by a number within 2^-9 of 1; zeros stay."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @torch.no_grad()
    def install(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in model.parameters():
            parameter *= 1 + 2.0**-9 * (2 * torch.rand(parameter.shape, generator=generator) - 1)


def moved(case: Case, seed: int) -> Case:
    """The same case from weights that are as good."""
    return dataclasses.replace(case, mechanism=lambda: Several(Moved(seed), case.mechanism()))


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("composer").setLevel(logging.ERROR)
    logging.getLogger("foundry_fp8").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", choices=["all", *run.SPLITS], default="all")
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--resume", action="store_true", help="leave out cases that are stored")
    arguments = parser.parse_args()
    stored = json.loads(run.FLOOR.read_text()) if run.FLOOR.exists() else {"runs": {}}
    stored["environment"] = environment()
    labels = run.stored_labels()
    for _, case in run.chosen(arguments.split, arguments.only):
        if case.label != "diverges" or (arguments.resume and case.name in stored["runs"]):
            continue
        high = run.numbers(labels[case.name]["losses"]["high"])
        apart = [judge.above(train(moved(case, seed), "high").losses, high) for seed in SEEDS]
        stored["runs"][case.name] = run.finite(apart)
        print(f"{case.name:28s}" + "  ".join(f"{share:+.2%}" for share in apart), flush=True)
        run.FLOOR.write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    main()
