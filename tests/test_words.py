"""Words that are not used: each has a plain one in the field (CONTRIBUTING.md, "How we write")."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REFUSED = (
    "told|tells|rungs?|sick|young|borne|bears|way back|spoil(s|ed|t)?|made again|rooms|a look|keeps house|surprises|"
    "(which|first|second|held.out|other) hal(f|ves) of the (suite|cases|runs)"
)
PATTERN = re.compile(rf"(?<![\w.])({REFUSED})(?!\w)", re.IGNORECASE)
READ = sorted(
    path
    for folder in ("foundry_fp8", "docs", "tests", "benchmarks", "examples", "")
    for path in ((ROOT / folder).rglob("*") if folder else ROOT.glob("*"))
    if path.suffix in (".py", ".md", ".yaml") and path != Path(__file__)
)


def found_in(text: str) -> list[str]:
    return [match[0] for match in PATTERN.finditer(text)]


def test_the_pattern_finds_what_it_refuses():
    assert found_in("It was told so; a rung of the way back.") == ["told", "rung", "way back"]
    assert found_in("lines.tell() of half a tensor looks retold") == []


def test_no_message_names_a_page_that_a_wheel_does_not_have():
    """Pages are not packed; a docstring or a comment may name one."""
    found = []
    for path in (ROOT / "foundry_fp8").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            (path.name, node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
            if re.search(r"(?<![\w/])docs/\w+\.md", node.value)
        ]
    assert found == []


@pytest.mark.parametrize("folder", sorted({path.relative_to(ROOT).parts[0] for path in READ}))
def test_no_refused_word(folder):
    found = {}
    for path in READ:
        name = path.relative_to(ROOT)
        if name.parts[0] == folder and name.name != "CONTRIBUTING.md":
            text = path.read_text()
            words = found_in(text) + found_in(re.sub(r"[_/]", " ", str(name)))
            if path.suffix == ".py":  # parts of names too
                words += found_in(text.replace("_", " "))
            if words:
                found[str(name)] = words
    assert found == {}
