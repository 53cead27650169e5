"""Measures committed ratios again, and fails where one has become worse: ``make benchmarks``, on a quiet machine.

    python benchmarks/regression.py [--repeats 9] [--only linear_cpu]

Ratios, because seconds depend on the machine: step time and bytes, each of the same machine's float32 or unchanged run.
The newest committed file of each benchmark is the measure; on another kind of processor its time ratios do not hold, and
``--bytes`` leaves them out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from common import RESULTS

Rows = list[dict[str, Any]]
TIME, BYTES = 1.2, 1.02
"""How much larger than the committed one a ratio may be: medians of times move by several percent, bytes do not."""


def measure_linear(repeats: int) -> Rows:
    from linear_cpu import table

    return table(repeats)


def measure_memory(repeats: int) -> Rows:
    from common import keep_freed_memory
    from memory import table

    keep_freed_memory()
    return table("demo", repeats)


CHECKS: dict[str, tuple[Callable[[int], Rows], Callable[[dict], Rows], dict[str, float]]] = {
    "linear_cpu": (measure_linear, lambda f: f["rows"], {"of_float32": TIME, "saved_of_float32": BYTES}),
    "memory_cpu": (
        measure_memory,
        lambda f: f["tables"]["demo"],
        {"time_ratio": TIME, "peak_ratio": BYTES},
    ),
}
"""By the prefix of the result's file: how to measure, where its rows are, and the ratios with their slack."""


def committed(prefix: str) -> tuple[str, dict[str, Any]]:
    """The newest result: the last by name, as names end in a date."""
    path = max(RESULTS.glob(f"{prefix}_[0-9]*.json"))
    return path.name, json.loads(path.read_text())


def worse(before: Rows, now: Rows, slack: dict[str, float]) -> list[str]:
    """What is worse than committed, or no longer measured. Plans are left out: which one is chosen follows the seconds."""
    measured = {row["case"]: row for row in now}
    found = []
    for row in before:
        case = row["case"]
        if case.startswith(("planner", "torchao")):
            continue
        if case not in measured:
            found.append(f"{case}: not measured any more")
            continue
        for ratio, factor in slack.items():
            was, got = row[ratio], measured[case][ratio]
            if not got <= was * factor:  # also where it is NaN
                found.append(f"{case}: {ratio} is {got:.3f}, committed {was:.3f}, allowed {was * factor:.3f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=CHECKS)
    parser.add_argument("--bytes", action="store_true", help="compare bytes alone")
    args = parser.parse_args()
    failed = False
    for prefix, (measure, rows_of, slack) in CHECKS.items():
        if args.only not in (None, prefix):
            continue
        name, before = committed(prefix)
        kept = {ratio: factor for ratio, factor in slack.items() if not args.bytes or factor == BYTES}
        found = worse(rows_of(before), measure(args.repeats), kept)
        failed |= bool(found)
        print(
            f"{name}: " + ("\n  ".join(["worse", *found]) if found else "as committed, or better"), flush=True
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
