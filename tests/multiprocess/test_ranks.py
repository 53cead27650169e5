"""What holds for every rank that the tests fork."""

import ast
from pathlib import Path

FOLDERS = [Path(__file__).parent, Path(__file__).parents[1] / "combinations"]


def test_no_rank_destroys_its_group():
    """It can hang, rarely (``ranks.py`` says why); one of some thousand runs of ``test_delayed_scaling.py`` did."""
    files = {file: ast.parse(file.read_text()) for folder in FOLDERS for file in sorted(folder.glob("*.py"))}
    assert len(files) > 20
    found = [
        f"{file.parent.name}/{file.name}:{node.lineno}"
        for file, tree in files.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name | ast.alias)
        and "destroy_process_group" in (getattr(node, "attr", ""), getattr(node, "id", ""), getattr(node, "name", ""))
    ]  # fmt: skip
    assert not found
