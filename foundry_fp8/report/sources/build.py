"""A run from the lines of any log: types, steps that were logged twice, and what is to be said of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from foundry_fp8.report.run import Run, Series, recipe_of
from foundry_fp8.report.sources.lines import LARGEST, number, plain_text

__all__ = ["build", "typed"]

Lines = Sequence[Mapping[str, Any]]


def build(
    header: Mapping[str, Any],
    batches: Lines,
    *,
    others: Lines = (),
    evals: Lines = (),
    problems: Sequence[str] = (),
    unreadable: tuple[Sequence[int], int] = ((), 0),
    **known: Any,
) -> Run:
    """The run.

    Args:
        header: What it says of itself.
        batches: ``step``, and what there is of ``loss``, ``seconds``, ``tokens``, ``host_peak_bytes``, ``metrics``.
        others: ``step`` and ``metrics`` beside them.
        evals: The same, of evaluations.
        problems: Those that are known already.
        unreadable: The numbers of lines that cannot be read, and of how many lines.
        known: What else a :class:`Run` has: ``name``, ``path``, ``status``.
    """
    lost, count = unreadable
    said = list(problems)
    if lost:
        where = ", ".join(map(str, lost[:5])) + (", ..." if len(lost) > 5 else "")
        said.append(f"{len(lost)} of {count} lines cannot be read (line {where}); they are left out.")
    head = typed(header, said)
    kept = _last_of_each([batch["step"] for batch in batches])
    if len(kept) < len(batches):
        less = len(batches) - len(kept)
        said.append(f"Steps were logged again: the later lines count, {less} earlier ones do not.")
    batches = [batches[index] for index in kept]
    step = np.array([batch["step"] for batch in batches], dtype=np.int64)
    loss = _column(batches, "loss")
    has_loss = np.array([batch.get("loss") is not None for batch in batches], dtype=bool)
    bad = step[has_loss & ~np.isfinite(loss)]
    if len(bad):
        said.append(f"The loss is not finite in {len(bad)} steps, first in step {bad[0]}.")
    columns: Any = {key: _column(batches, key) for key in ("seconds", "tokens", "host_peak_bytes")}
    run = Run(header=head, step=step, loss=loss, has_loss=has_loss, metrics=_series([*batches, *others]),
              evals=_series(evals), problems=[plain_text(problem) for problem in said], **columns, **known)  # fmt: skip
    run.name, run.status = plain_text(run.name), plain_text(run.status)
    run.precisions = run.precisions or (recipe_of(head),)
    return run


def typed(header: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The header, with ``None`` for what has another type than a report reads; ``problems`` is appended to."""
    wrong: list[str] = []
    found = _fit(dict(header), _HEADER, "", wrong)
    if wrong:
        problems.append(f"Its header is not understood in {', '.join(wrong[:5])}: left out.")
    return found


def _fit(value: Any, shape: Any, where: str, wrong: list[str]) -> Any:
    if isinstance(shape, dict) and isinstance(value, dict):
        there = {key: inner for key, inner in shape.items() if value.get(key) is not None}
        fitted = {key: _fit(value[key], there[key], f"{where}.{key}".strip("."), wrong) for key in there}
        return value | fitted
    if isinstance(shape, list) and isinstance(value, list):
        found = [_fit(item, shape[0], where, wrong) for item in value]
        return [item for item in found if item is not None]
    if callable(shape) and shape(value):
        return value
    wrong.append(where)
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and 1 <= value < 2**31


_MODULE = {"count": _is_size, "shape": [lambda value: True]}
_REPORT = {
    **dict.fromkeys(("total", "left_out", "converted_share"), _is_number),
    **{key: [_MODULE] for key in ("rows", "attention")},
}
_HEADER = {
    **{"world_size": _is_size, "nodes": _is_size, "parameters": _is_number, "versions": {}},
    "hyperparameters": {"fp8": _REPORT, "fp8_as_run": _REPORT},
}
"""Of what a report reads in a header."""


def _last_of_each(steps: Sequence[int]) -> list[int]:
    """Which lines count, by step, where a resume or ``fit(reset_time=True)`` logged steps again.

    The later ones. Of the earlier course, what comes after the step at which it began again does not count either.
    """
    seen: set[int] = set()
    again = [step in seen or seen.add(step) for step in steps]  # type: ignore[func-returns-value]
    kept, bound = [], math.inf
    for index in reversed(range(len(steps))):
        if steps[index] < bound:
            kept.append(index)
            bound = steps[index] if again[index] else bound
    return sorted(kept, key=lambda index: steps[index])


def _column(lines: Lines, key: str) -> np.ndarray:
    """NaN for what is no number."""
    found = np.full(len(lines), np.nan)
    for index, line in enumerate(lines):
        with contextlib.suppress(ValueError):
            found[index] = number(line.get(key))
    return found


def _series(lines: Lines) -> dict[str, Series]:
    found: dict[str, dict[int, float]] = {}
    for line in sorted(lines, key=lambda line: line["step"]):  # stable: the later of one step counts
        for key, value in (line.get("metrics") or {}).items():
            with contextlib.suppress(ValueError):
                found.setdefault(key, {})[line["step"]] = number(value)
    return {
        key: Series(steps=np.array([*values], dtype=np.int64), values=np.array([*values.values()]))
        for key, values in found.items()
    }
