"""The divergence guard on labelled runs: what it saw, when, what it did, and what that was worth.

    python benchmarks/guard/run.py                          the guard on every case, against the stored labels
    python benchmarks/guard/run.py --labels                 high precision and FP8 without the guard first: store what each run is
    python benchmarks/guard/run.py --split tuned            only those that the guard's thresholds may be chosen on
    python benchmarks/guard/run.py --resume                 only what is not stored as run by this very code; each is stored as it ends
    python benchmarks/guard/run.py --only swiglu_alignment  some cases; nothing is stored but with --resume
    python benchmarks/guard/run.py --table                  tabulate and draw what is stored

Cases: ``tuned.py`` and ``held_out.py``. A label is a claim (diverges in FP8 alone, in both precisions, healthy) that ``--labels``
checks. ``--save NAME`` writes ``results/NAME.json`` and ``.md`` and ``docs/images/NAME.png``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import fingerprint
import held_out
import judge
import table
import torch
import tuned
from case import Case
from common import RESULTS, environment
from mechanisms.base import Mechanism
from train import GUARD, train

import foundry_fp8

LABELS = RESULTS / "guard_labels.json"
FLOOR = RESULTS / "guard_floor.json"
SPLITS = {"tuned": tuned.CASES, "held-out": held_out.CASES}


def finite(value: Any) -> Any:
    """The same without NaN and Inf, which are not JSON; losses to five digits."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else str(value)
    return value


def numbers(losses: list[Any]) -> list[float]:
    """Losses as they were: NaN and Inf are stored as text."""
    return [float(value) for value in losses]


def chosen(split: str, only: Sequence[str] | None) -> list[tuple[str, Case]]:
    found = [
        (name, case)
        for name, cases in SPLITS.items()
        for case in cases
        if split in ("all", name) and (only is None or case.name in only)
    ]
    if not found:
        names = ", ".join(case.name for cases in SPLITS.values() for case in cases)
        raise SystemExit(f"--split {split} --only {only}: no such case. Cases: {names}")
    return found


def stored_labels() -> dict[str, Any]:
    """The losses without the guard, with what follows from them."""
    if not LABELS.exists():
        return {}
    stored = json.loads(LABELS.read_text())["cases"]
    return {
        case.name: {
            **stored[case.name],
            **judge.label(case, *map(numbers, stored[case.name]["losses"].values())),
        }
        for cases in SPLITS.values()
        for case in cases
        if case.name in stored
    }


def stored_floor() -> dict[str, list[float]]:
    """By case, how far runs in high precision that are equally right lie from the one that is compared with (``floor.py``)."""
    return json.loads(FLOOR.read_text())["runs"] if FLOOR.exists() else {}


def label(case: Case) -> dict[str, Any]:
    """Train without the guard; what the run is."""
    high, fp8 = train(case, "high").losses, train(case, "fp8").losses
    calm = high
    if case.label == "diverges in both":
        calm = train(dataclasses.replace(case, mechanism=Mechanism, lr=Case.lr), "high").losses
    losses = {"high": high, "fp8": fp8, "reference": calm}
    return {"label": case.label, "losses": losses, **judge.label(case, high, fp8, calm)}


def guarded(case: Case) -> dict[str, Any]:
    """Train under the guard: losses, what ran in FP8, what the guard did."""
    run = train(case, "guarded")
    in_fp8 = run.linears_in_fp8
    if case.attention:  # attention counts as much as the linears
        in_fp8 = [(a + b) / 2 for a, b in zip(run.linears_in_fp8, run.attention_in_fp8, strict=True)]
    return {"losses": run.losses, "in_fp8": in_fp8, "events": run.events}


def row(split: str, case: Case, known: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """How the guard did on one case."""
    losses, high = numbers(run["losses"]), numbers(known["losses"]["high"])
    return {
        "name": case.name,
        "split": split,
        "label": case.label,
        "about": case.about,
        "onset": case.onset,
        "departure": known["departure"],
        "fp8_above_reference": known["fp8_above_reference"],
        **judge.verdict(case, known["departure"], losses, high, run["events"], run["in_fp8"]),
        "floor": max(map(abs, stored_floor().get(case.name, [])), default=None),
        "losses": losses,
        "events": run["events"],
    }


def provenance() -> dict[str, Any]:
    """By which command and with which code a half was run last."""
    last = ["git", "log", "-1", "--format=%h", "--", "foundry_fp8"]
    package = Path(foundry_fp8.__file__).parents[1]
    return {
        "command": " ".join(["python benchmarks/guard/run.py", *sys.argv[1:]]),
        "commit": subprocess.run(last, capture_output=True, text=True, cwd=package).stdout.strip(),
        "code": fingerprint.of_package(package),
        "environment": environment(),
    }


def stored_runs(name: str) -> dict[str, Any]:
    """What is stored under a name: the guard's settings, by which command each half was made, runs by case."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"guard": GUARD, "made": {}, "runs": {}}


def begin(name: str, halves: set[str], made: dict[str, Any], resume: bool) -> dict[str, Any]:
    """What is stored, without the halves that are run now; with ``resume``, with all of their runs, each of which knows its code."""
    stored = stored_runs(name)
    for half in halves:
        if not resume:
            for case in SPLITS[half]:
                stored["runs"].pop(case.name, None)
        stored["made"][half] = made
    return {**stored, "guard": GUARD}


def publish(name: str, labels: dict[str, Any]) -> None:
    """Table and time lines of what is stored."""
    result = stored_runs(name)
    rows = [
        row(split, case, labels[case.name], result["runs"][case.name])
        for split, case in chosen("all", None)
        if case.name in result["runs"]
    ]
    table.publish(name, result, rows, labels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", choices=["all", *SPLITS], default="all")
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument(
        "--labels", action="store_true", help="run without the guard and store the labels' figures"
    )
    parser.add_argument("--table", action="store_true", help="only tabulate and draw what is stored")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what is stored, and leave out cases whose stored run is by this code (its syntax trees)",
    )
    parser.add_argument("--save", default="guard", help="under which name the results are stored")
    arguments = parser.parse_args()
    logging.getLogger("composer").setLevel(logging.ERROR)
    logging.getLogger("foundry_fp8").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    labels = stored_labels()
    if arguments.table:
        publish(arguments.save, labels)
        return
    cases = chosen(arguments.split, arguments.only)
    if arguments.labels:
        for split, case in cases:
            told = labels[case.name] = label(case)
            print(
                f"{split:9s}{case.name:28s}{case.label:17s}FP8 {told['fp8_above_reference']:+8.1%}, high precision "
                f"{told['high_above_reference']:+8.1%} above; leaves at {told['departure']}; "
                f"{'holds' if told['holds'] else 'DOES NOT HOLD'}", flush=True,
            )  # fmt: skip
            LABELS.write_text(json.dumps({"environment": environment(), "cases": finite(labels)}) + "\n")
        return
    stores = arguments.only is None or arguments.resume
    made = provenance()
    result = begin(arguments.save, {split for split, _ in cases}, made, arguments.resume or not stores)
    for split, case in cases:
        if case.name not in labels:
            raise SystemExit(f"{case.name} has no label yet: run with --labels --only {case.name}")
        by = {"code": made["code"], "case": fingerprint.of_case(case)}
        if stores and by.items() <= result["runs"].get(case.name, {}).items():
            continue
        result["runs"][case.name] = run = {**finite(guarded(case)), **by}
        print(table.line(row(split, case, labels[case.name], run)), flush=True)
        if stores:  # after each, so that a stop loses nothing
            (RESULTS / f"{arguments.save}.json").write_text(json.dumps(result) + "\n")
    if stores:
        publish(arguments.save, labels)
        print((RESULTS / f"{arguments.save}.md").read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
