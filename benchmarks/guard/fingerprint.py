"""Which code a guarded run follows from: digests of syntax trees, whatever comments, docstrings and layout, so that a stored run tells
whether it would be the same today.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

from case import Case

DEPENDS = (
    "foundry_fp8/numerics", "foundry_fp8/layers", "foundry_fp8/backends/emulated", "foundry_fp8/models/fog",
    "foundry_fp8/observe/divergence", "foundry_fp8/observe/operand_*.py", "foundry_fp8/observe/product_noise.py",
    "foundry_fp8/observe/loss_cost.py", "foundry_fp8/observe/attention_error.py", "foundry_fp8/callbacks/divergence_guard",
    "benchmarks/guard/train.py",
)  # fmt: skip
"""What the losses and events of every guarded run follow from, besides torch and the host models."""


def of_package(root: Path) -> str:
    """Of the code in :data:`DEPENDS` under ``root``."""
    digest = hashlib.sha256()
    for pattern in DEPENDS:
        for path in sorted(root.glob(pattern if pattern.endswith(".py") else f"{pattern}/**/*.py")):
            digest.update(f"{path.relative_to(root)} {ast.dump(_code(path))}".encode())
    return digest.hexdigest()[:12]


def of_case(case: Case) -> str:
    """Of a case, and of the files of mechanisms that its half imports: another half may be written, and this is the same."""
    half, written = _written(case)
    digest = hashlib.sha256(written.encode())
    for path in sorted(_imported(half)):
        digest.update(f"{path.relative_to(_root())} {ast.dump(_code(path))}".encode())
    return digest.hexdigest()[:12]


def _root() -> Path:
    return Path(__file__).parent


@functools.cache
def _code(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            told = [n for n in node.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
            node.body = [n for n in node.body if n not in told]
    return tree


def _written(case: Case) -> tuple[Path, str]:
    """The file that a case is written in, and what is written there of it, with the file's constants and without its ``about``."""
    for path in sorted(_root().rglob("*.py")):
        if case.name in (cases := _cases(path)):
            constants = [ast.dump(node) for node in _code(path).body if _constant(node)]
            return path, repr([*constants, cases[case.name]])
    raise LookupError(f"no Case(name={case.name!r}) in {_root()}")


@functools.cache
def _cases(path: Path) -> dict[str, str]:
    """By name, the arguments of the cases that are written in a file."""
    found = {}
    for call in ast.walk(_code(path)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Case":
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            if isinstance(name := given.pop("name", None), ast.Constant):
                given.pop("about", None)
                found[name.value] = repr(sorted((str(key), ast.dump(value)) for key, value in given.items()))
    return found


def _constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.FunctionDef) and "CASES" not in ast.dump(node)


def _imported(path: Path) -> set[Path]:
    """The files of the suite that it takes names from, and those that these do. Halves are imported whole, and are not meant."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        for node in ast.walk(_code(waiting.pop())):
            if isinstance(node, ast.ImportFrom):
                file = _root() / f"{str(node.module).replace('.', '/')}.py"
                if file.exists() and file not in found:
                    found.add(file)
                    waiting.append(file)
    return found
