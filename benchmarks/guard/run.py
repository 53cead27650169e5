"""The divergence guard on labelled runs: what it saw, when, what it did, and what that was worth.

    python benchmarks/guard/run.py                          the guard on every case, against the stored labels
    python benchmarks/guard/run.py --only swiglu_alignment  on some cases; no table is written
    python benchmarks/guard/run.py --interval 20 --rows 1   with other settings than train.GUARD's
    python benchmarks/guard/run.py --labels                 high precision and FP8 without the guard: store what each run is

A label is a claim (diverges in FP8 alone, in both precisions, healthy) that ``--labels`` checks.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import multiprocessing
import sys
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import judge
import torch
from case import Case
from cases import CASES
from common import RESULTS, environment
from mechanisms.base import Mechanism
from train import GUARD, train

LABELS, TABLE = RESULTS / "guard_labels.json", RESULTS / "guard_suite.md"
COLUMNS = (
    "case", "what happens", "label", "FP8 alone", "leaves at step", "first alarm", "lead", "with the guard", "share in FP8", "demotions", "promotions",
)  # fmt: skip
KINDS = {case.name: case for case in CASES}


def known(name: str, stored: dict[str, Any]) -> dict[str, Any]:
    """The stored losses without the guard, with what follows from them."""
    losses = {run: [float(loss) for loss in values] for run, values in stored[name]["losses"].items()}
    return {**judge.label(KINDS[name], **losses), "high": losses["high"]}


def quiet() -> None:
    """In every process: one thread, and nothing said but what this script prints."""
    torch.set_num_threads(1)
    for name in ("composer", "foundry_fp8"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def written(loss: float) -> float | str:
    """Five digits; NaN and Inf, which are not JSON, as text."""
    return round(loss, 5) if math.isfinite(loss) else str(loss)


def labelled(name: str) -> tuple[str, dict[str, Any]]:
    """Train without the guard."""
    case = KINDS[name]
    runs = {"high": train(case, "high").losses, "fp8": train(case, "fp8").losses}
    runs["reference"] = runs["high"]
    if case.label == "diverges in both":
        runs["reference"] = train(dataclasses.replace(case, mechanism=Mechanism, lr=Case.lr), "high").losses
    return name, {"label": case.label, "losses": {run: list(map(written, runs[run])) for run in runs}}


def guarded(options: dict[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    """Train with the guard; what ``judge.verdict`` asks for."""
    run = train(KINDS[name], "guarded", options)
    in_fp8 = run.linears_in_fp8
    if KINDS[name].attention:  # attention counts as much as the linears
        in_fp8 = [(a + b) / 2 for a, b in zip(run.linears_in_fp8, run.attention_in_fp8, strict=True)]
    return name, {"losses": run.losses, "events": run.events, "in_fp8": in_fp8}


def percent(share: float) -> str:
    return f"{share:+.1%}" if abs(share) < 100 else "diverged"


def cells(name: str, row: dict[str, Any]) -> list[str]:
    case = KINDS[name]
    steps = ["" if row[key] is None else str(row[key]) for key in ("departure", "first_alarm", "lead_steps")]
    return [
        name, case.about, case.label, percent(row["fp8_above_reference"]), *steps, percent(row["guarded_above_high"]), f"{row['time_in_fp8']:.0%}",
        str(row["demotions"]), str(row["promotions"]),
    ]  # fmt: skip


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), metavar="NAME", help="names of cases")
    parser.add_argument("--labels", action="store_true", help="run without the guard and store the losses")
    parser.add_argument("--interval", type=int, default=GUARD["interval"])
    parser.add_argument("--rows", type=int, default=GUARD["rows"])
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    names = arguments.only or list(KINDS)
    options = {**GUARD, "interval": arguments.interval, "rows": arguments.rows}
    stored = json.loads(LABELS.read_text())["cases"] if LABELS.exists() else {}
    if not arguments.labels and (missing := [name for name in names if name not in stored]):
        parser.error(f"no label yet: run with --labels --only {' '.join(missing)}")
    rows: dict[str, dict[str, Any]] = {}
    work = labelled if arguments.labels else functools.partial(guarded, options)
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, quiet) as pool:
        for name, result in pool.imap_unordered(work, names):
            if arguments.labels:
                stored = {n: s for n, s in {**stored, name: result}.items() if n in KINDS}
                LABELS.write_text(json.dumps({"environment": environment(), "cases": stored}) + "\n")
            alone = known(name, stored)
            if arguments.labels:
                print(f"{name}: FP8 {alone['fp8_above_reference']:+.1%}, high precision {alone['high_above_reference']:+.1%} above, "
                      f"leaves at {alone['departure']}; {KINDS[name].label} {'holds' if alone['holds'] else 'DOES NOT HOLD'}", flush=True)  # fmt: skip
                continue
            rows[name] = alone | judge.verdict(KINDS[name], alone["departure"], high=alone["high"], **result)
            shown = zip(COLUMNS, cells(name, rows[name]), strict=True)
            print("; ".join(f"{head}: {cell}" for head, cell in shown if head != "what happens"), flush=True)
    counted = judge.summary(list(rows.values()))
    print(counted if rows else "")
    if rows.keys() == KINDS.keys():
        made = f"`python benchmarks/guard/run.py`, guard {json.dumps(options)}, {json.dumps(environment())}"
        table = [COLUMNS, ["---"] * len(COLUMNS), *(cells(name, rows[name]) for name in KINDS)]
        lines = [made, "", counted, "", *(f"| {' | '.join(line)} |" for line in table), ""]
        TABLE.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
