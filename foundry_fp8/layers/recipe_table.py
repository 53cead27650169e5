"""What each layer of a converted model runs, in one string of a checkpoint, where they do not all run the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from foundry_fp8.layers.gemm_layer import Choice, FP8GemmLayer
from foundry_fp8.numerics.recipes import Recipe, parse_recipe

__all__ = ["MEASURED", "POLICY", "choice_of", "difference", "measured_table", "scaling_of", "table_of"]

POLICY, MEASURED = "policy", "measured"
"""The ``name`` under which a checkpoint holds a table in a recipe's place: of rules, or of a measurement."""
_NOT_OF_THE_STATE = ("fast_accumulation", "amax_group", "reduce_amax")
"""Fields of a saved recipe on which scales do not depend; the last one is of older checkpoints."""


def table_of(modules: Mapping[str, FP8GemmLayer]) -> dict[str, Any] | None:
    """``{"name": "policy", "table": text}`` for linears that were converted to several recipes, or several wgrads; else ``None``."""
    rows = {name: _row(module) for name, module in modules.items() if module.recipes}
    first = next(iter(rows.values()))
    if "turns" not in first and all(row == first for row in rows.values()):
        return None
    return {"name": POLICY, "table": json.dumps(rows, sort_keys=True)}


def measured_table(choice: Mapping[str, Recipe | None]) -> dict[str, Any]:
    """The same of a measurement's choice; with nothing in it before there is one."""
    rows = {name: recipe and recipe.to_dict() for name, recipe in choice.items()}
    return {"name": MEASURED, "table": json.dumps(rows, sort_keys=True) if rows else ""}


def choice_of(table: Mapping[str, Any]) -> dict[str, Recipe | None]:
    """The choice in :func:`measured_table`."""
    rows = json.loads(table["table"] or "{}")
    return {name: row and parse_recipe(row) for name, row in rows.items()}


def difference(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """How a checkpoint's recipe differs from this run's; of two tables, the first layer that runs something else."""
    if saved.get("name") != POLICY or ours["name"] != POLICY:
        said = [one["name"] if "table" in one else dict(one) for one in (saved, ours)]
        return f"the recipe {said[0]}, this run uses {said[1]}"
    theirs, mine = (json.loads(one["table"]) for one in (saved, ours))
    name = next(name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name))
    return f"another policy, in which {name} runs {theirs.get(name, 'high precision')} and here {mine.get(name, 'high precision')}"


def _row(module: FP8GemmLayer) -> dict[str, Any]:
    if module.turns:  # without their times, which may be others after a resume
        return {"turns": [[t.recipe and scaling_of(t.recipe.to_dict()), *_beside(t)] for t in module.turns]}
    beside = {gemm: getattr(module, gemm) for gemm in ("fprop", "dgrad") if getattr(module, gemm) != "fp8"}
    return {**scaling_of(module.recipes[0].to_dict()), **beside, "wgrad": module.wgrad}


def _beside(turn: Choice) -> list[str]:
    return sorted(g if how == "high_precision" else f"{g} {how}" for g, how in turn.beside.items())


def scaling_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What makes scales in a recipe or table, as a checkpoint holds it."""
    return {name: value for name, value in recipe.items() if name not in _NOT_OF_THE_STATE}
