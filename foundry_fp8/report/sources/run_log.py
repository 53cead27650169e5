"""Logs that ``run_log`` wrote, whole or cut off.

Reads JSON lines with the standard library and NumPy alone, so that logs can be compared on a machine that cannot train.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foundry_fp8.report.run import Run, Table, recipe_of
from foundry_fp8.report.sources.build import build, typed
from foundry_fp8.report.sources.lines import decode, number, text_lines, whole

__all__ = ["FILE_NAME", "read"]

FILE_NAME = "run_log.jsonl"
FORMAT_VERSION = 1
"""The newest that is known here (``callbacks/run_log.py`` writes it)."""
_STEPPED = ("batch", "eval", "metrics")


def read(file: Path) -> Run:
    """Read one log.

    Nothing in it is fatal but the absence of any line that can be read: what is missing is said in :attr:`Run.problems`.

    Raises:
        ValueError: No line can be read, or a newer version wrote them.
    """
    header: dict[str, Any] = {}
    batches: list[dict[str, Any]] = []
    evals: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    tables: dict[str, Table] = {}
    status = "unknown"
    problems: list[str] = []
    unreadable: list[int] = []
    started_as: list[tuple[int, dict[str, Any]]] = []
    count = readable = 0
    for number_of, text in text_lines(file):
        count += 1
        parts = decode(text)
        lines = [line for part in parts if (line := _checked(part)) is not None]
        readable += len(lines)
        if len(lines) < len(parts):
            unreadable.append(number_of)
        for line in lines:
            kind = line["kind"]
            if kind == "header":
                version = line.get("format_version", FORMAT_VERSION)
                if not isinstance(version, int) or version > FORMAT_VERSION:
                    raise ValueError(
                        f"{file} was written by a newer foundry-fp8 (format {version}; this one reads up to {FORMAT_VERSION}): "
                        "compare it with that one."
                    )
                resumed_at = line["step"]
                # A resumed run repeats the steps after its checkpoint: the repetition counts.
                batches = [batch for batch in batches if batch["step"] <= resumed_at]
                evals = [entry for entry in evals if entry["step"] <= resumed_at]
                others = [entry for entry in others if entry["step"] < resumed_at]
                if resumed_at == 0 and header:
                    problems.append("It was started again under the same name: what came before is left out.")
                    started_as.clear()
                # A start knows its whole configuration: nothing of an earlier one is carried over.
                header = line
                started_as.append((resumed_at, header))
                status = "unknown"
            elif kind in _STEPPED:
                {"batch": batches, "eval": evals, "metrics": others}[kind].append(line)
            elif kind == "hparams":
                header.setdefault("hyperparameters", {}).update(line["values"])
            elif kind == "table":
                name = str(line.get("name"))
                tables[name] = Table(name=name, columns=line["columns"], rows=line["rows"])
            elif kind == "end":
                status = str(line.get("status"))
    if not readable:
        raise ValueError(f"{file} is not a run log: none of its {count} lines can be read as one.")
    if not header:
        problems.append("The log has no header: configuration, device and precision are not known.")
    if status == "unknown":
        problems.append("The log has no last line: the run was killed or goes on; what follows is partial.")
    elif status != "finished":
        problems.append(f"The run did not finish ({status}); what follows is partial.")
    if not batches:
        problems.append("No step was logged.")
    precisions = [recipe_of(typed(start, [])) for _, start in started_as]
    if len(set(precisions)) > 1:
        steps = ", ".join(
            f"{name} from step {step}" for (step, _), name in zip(started_as, precisions, strict=True)
        )
        problems.append(f"Its precision changed when it was resumed ({steps}): its figures mix them.")
    return build(
        header,
        batches,
        name=str(header.get("run_name") or file.parent.name),
        path=file,
        others=others,
        evals=evals,
        tables=list(tables.values()),
        status=status,
        precisions=tuple(dict.fromkeys(precisions)),
        problems=problems,
        unreadable=(unreadable, count),
    )


def _checked(line: Any) -> dict[str, Any] | None:
    """The line with the types that its kind has; ``None`` for what is none of a run log's."""
    kind = line.get("kind") if isinstance(line, dict) else None
    mapping = {"hparams": "values", "header": "hyperparameters"}.get(str(kind), "metrics")
    if not isinstance(kind, str) or not isinstance(line.get(mapping) or {}, dict):
        return None
    found = {**line, mapping: line.get(mapping) or {}}
    try:
        if kind == "header" or kind in _STEPPED:
            found["step"] = whole(line.get("step") or 0 if kind == "header" else line.get("step"))
        if kind == "batch" and line.get("loss") is not None:
            number(line["loss"])
        if kind == "table":
            found |= {key: list(line.get(key) or []) for key in ("columns", "rows")}
            found["rows"] = [[*row] for row in found["rows"]]
    except (TypeError, ValueError):
        return None
    return found
