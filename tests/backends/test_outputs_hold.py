"""Bytes and scales of every recipe's operands are those of the release before: a table of digests, made before the code was rearranged.

Made anew by: python -m tests.backends.test_outputs_hold
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from foundry_fp8.backends.emulated.quantizers import quantize_operand
from foundry_fp8.numerics.recipes import parse_recipe
from tests.kernels.interpreter import interpret

TABLE = Path(__file__).with_name("outputs_hold.json")
RECIPES = {
    "delayed": "delayed",
    "delayed, e4m3": {"name": "delayed", "fp8_format": "e4m3"},
    "current": "current",
    "current, powers of two": {"name": "current", "power_2_scales": True},
    "rows": {"name": "current", "granularity": "row"},
    "block": "block",
    "block, float32 scales": {"name": "block", "power_2_scales": False, "fp8_format": "hybrid"},
    "mxfp8": "mxfp8",
    "unit": {"name": "unit", "gradient_scale": 4096},
}
SHAPES = ((128, 256), (64, 96))


def tensor(rows, columns, dtype):
    """Values of many magnitudes, the same on every machine: by integers alone."""
    i = torch.arange(rows * columns, dtype=torch.int64)
    mixed = ((i * 2654435761) % 4294967296).double() / 4294967296 - 0.5
    x = mixed * torch.exp2(((i * 40503) % 13 - 6).double())
    return x.view(rows, columns).to(dtype)


def digest(*tensors):
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def emulated(recipe, operand, along, shape, dtype):
    scale = torch.tensor(3.7) if recipe.name == "delayed" else None
    q = quantize_operand(tensor(*shape, dtype), operand, recipe, along=along, scale=scale)
    return digest(q.data, q.scale_inv)


def native(recipe, operand, shape, dtype):
    from foundry_fp8.backends.native.plan import plan_of
    from foundry_fp8.backends.native.scaling import SCALINGS
    from foundry_fp8.backends.native.source import Layouts, Source

    scale = torch.tensor(3.7) if recipe.name == "delayed" else None
    source, plan = Source(tensor(*shape, dtype)), plan_of(recipe)
    by_rows, by_columns, stats, summed = SCALINGS[plan.kind].quantize(
        source, operand, plan, Layouts(True, True, True), (scale, None, None), direct=True
    )
    return digest(*by_rows, *by_columns, stats, summed)


def cases():
    for name in RECIPES:
        for operand in ("x", "w", "dy"):
            for shape in SHAPES:
                for dtype in (torch.float32, torch.bfloat16):
                    yield name, operand, shape, dtype


def found(name, operand, shape, dtype):
    recipe = parse_recipe(RECIPES[name])
    key = f"{name} {operand} {shape[0]}x{shape[1]} {str(dtype).removeprefix('torch.')}"
    return {
        f"{key} along 1": emulated(recipe, operand, 1, shape, dtype),
        f"{key} along 0": emulated(recipe, operand, 0, shape, dtype),
        f"{key} native": native(recipe, operand, shape, dtype),
    }


TWINS = ("delayed, e4m3", "current, powers of two", "block, float32 scales")
"""Of a kernel that another recipe runs too; against the formulas in tests/kernels and tests/numerics."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in TWINS else ()) for name in RECIPES]
)
def test_operands_are_what_they_were(name, monkeypatch):
    interpret(monkeypatch)
    known = json.loads(TABLE.read_text())
    for case in cases():
        if case[0] == name:
            for key, value in found(*case).items():
                assert value == known[key], key


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        table = {key: value for case in cases() for key, value in found(*case).items()}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
