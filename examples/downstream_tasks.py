"""Small downstream tasks from held-out documents, in the form that LLM Foundry's in-context learning evaluation reads.

Three of the kinds of FOG's table 1, on what the demo's corpus holds: which of four lines comes next (multiple choice), which of two
names stood in this place (schema), and the rest of a name that the context has spelt before (language modelling).

    python examples/downstream_tasks.py demo-runs/tasks
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from foundry_fp8.data.corpus import Document, split_documents, standard_library_documents

__all__ = ["TASKS", "write_tasks"]

CHOICES = 4
LINES = (6, 12)
"""Of context, least and most."""
LINE = re.compile(r"\s*[^\s#].{14,70}")
"""A line that says something, short enough to compare with others."""
NAME = re.compile(r"\b[a-z_]{6,24}\b")

Examples = Iterator[dict[str, Any]]


def write_tasks(folder: Path, documents: Sequence[Document], each: int) -> int:
    """Write one JSONL file a task.

    Returns:
        How many questions the shortest task has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shortest = each
    for name, make in TASKS.items():
        found = [example for example, _ in zip(make(documents), range(each), strict=False)]
        text = "".join(json.dumps(example) + "\n" for example in found)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        shortest = min(shortest, len(found))
    return shortest


def _next_line(documents: Sequence[Document]) -> Examples:
    """Four lines, three of them of other places that look alike: the same indentation, nearly the same length."""
    pool: dict[int, list[str]] = {}
    for line in sorted(
        {line for document in documents for line in document.text.split("\n") if LINE.fullmatch(line)}
    ):
        pool.setdefault(_indent(line), []).append(line)
    for lines, at, rng in _places(documents):
        right, own = lines[at], set(lines)
        alike = pool.get(_indent(right), [])
        others = [line for line in alike if abs(len(line) - len(right)) <= 8 and line not in own]
        if len(others) >= CHOICES - 1:
            choices = [right, *rng.sample(others, CHOICES - 1)]
            rng.shuffle(choices)
            yield {"query": _context(lines, at, rng), "choices": choices, "gold": choices.index(right)}


def _copied_name(documents: Sequence[Document]) -> Examples:
    """The rest of a name of which the context holds a whole, and the last line the first three letters."""
    for lines, at, rng in _places(documents):
        context = _context(lines, at, rng)
        seen = set(NAME.findall(context))
        for found in NAME.finditer(lines[at]):
            if found[0] in seen:
                cut = found.start() + 3
                yield {"context": context + lines[at][:cut], "continuation": lines[at][cut : found.end()]}
                break


def _which_name(documents: Sequence[Document]) -> Examples:
    """Two contexts that differ in one name of their last line, and one continuation: the rest of the line."""
    for lines, at, rng in _places(documents):
        context = _context(lines, at, rng)
        names = sorted(set(NAME.findall(context)))
        found = next(
            (f for f in NAME.finditer(lines[at]) if f[0] in names and f.end() < len(lines[at]) - 3), None
        )
        others = [name for name in names if found and name != found[0]]
        if found is None or not others:
            continue
        options = [found[0], rng.choice(others)]
        rng.shuffle(options)
        yield {
            "context_options": [context + lines[at][: found.start()] + name for name in options],
            "continuation": lines[at][found.end() :],
            "gold": options.index(found[0]),
        }


TASKS: dict[str, Callable[[Sequence[Document]], Examples]] = {
    "next_line": _next_line,
    "which_name": _which_name,
    "copied_name": _copied_name,
}
"""By the name of the file and of the task."""


def _places(documents: Sequence[Document]) -> Iterator[tuple[list[str], int, random.Random]]:
    """Lines to ask for, one a document and round, in an order that does not depend on the machine."""
    for turn in range(50):
        for document in documents:
            seed = int.from_bytes(hashlib.sha256(f"{document.name} {turn}".encode()).digest()[:8], "little")
            rng = random.Random(seed)
            lines = document.text.split("\n")
            asked = [i for i, line in enumerate(lines) if i >= LINES[0] and LINE.fullmatch(line)]
            if asked:
                yield lines, rng.choice(asked), rng


def _context(lines: Sequence[str], at: int, rng: random.Random) -> str:
    return "\n".join(lines[max(0, at - rng.randint(*LINES)) : at]) + "\n"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


if __name__ == "__main__":
    held_out = split_documents(standard_library_documents())[1]
    print(f"{write_tasks(Path(sys.argv[1]), held_out, 100)} questions of each task in {sys.argv[1]}")
