"""What holds for every process group that the tests begin."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
ELSEWHERE = ("gpu", "real_te")
"""Their groups are nccl's, or of a process of their own."""


def test_nobody_destroys_a_group():
    """It can hang, rarely (``ranks.py`` says why); one of some thousand runs of ``test_delayed_scaling.py`` did, and one of ``test_linear.py``."""
    files = {
        file: file.read_text() for file in sorted(TESTS.rglob("*.py")) if not set(ELSEWHERE) & {*file.parts}
    }
    assert len(files) > 200
    found = [
        f"{file.parent.name}/{file.name}:{node.lineno}"
        for file, text in files.items()
        if "destroy_process_group" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute | ast.Name | ast.alias)
        and "destroy_process_group" in (getattr(node, "attr", ""), getattr(node, "id", ""), getattr(node, "name", ""))
    ]  # fmt: skip
    assert not found
