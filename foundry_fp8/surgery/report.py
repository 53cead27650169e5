"""The report of a conversion: every weight that is multiplied, in what, and why."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from foundry_fp8.numerics.recipes import GEMMS, Recipe, most_common_recipes
from foundry_fp8.surgery.policy import Choice
from foundry_fp8.surgery.rules import HIGH_PRECISION, Wgrad

__all__ = ["Action", "SurgeryReport", "SurgeryRow", "as_text", "kind_of", "merged_name", "merged_rows"]

Action = Literal["converted", "skipped", "unused"]

MOST_CHARACTERS = 5500
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurgeryRow:
    """What became of one module, or of one parameter that belongs to no linear layer."""

    name: str
    action: Action
    """``unused``: a batch showed that nothing multiplies by it."""
    reason: str
    """Why it was skipped; for a converted one, what it became."""
    shape: tuple[int, ...] = ()
    """Of the weight: ``[out, in]`` of a linear; empty for attention, which has none."""
    shared_with: str = ""
    """The earlier row that has the same weight, if any."""
    rule: str = ""
    """The YAML key of the rule that named it, if any."""
    gemms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The recipe of each GEMM, or ``high_precision``, as configured, a line for each rule with times; empty for what was not converted."""
    precision: str = ""
    """What a batch showed its product to run in: ``fp8``, ``bf16``, ...; empty before, and where none was seen."""

    @property
    def elements(self) -> int:
        """Elements of the weight that it adds to those that are multiplied."""
        return 0 if self.shared_with or self.action == "unused" or not self.shape else math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurgeryReport:
    """Every weight of the model that is multiplied: what it runs in, and why not in FP8.

    Linear layers and raw parameters of two or more dimensions (experts, ``in_proj_weight``, convolutions) have a row each.
    Whether anything multiplies by a raw parameter, and whether a converted layer is really called, only a batch can show:
    :func:`~foundry_fp8.surgery.first_batch.as_run` gives the report of what ran.

    Attributes:
        rows: One a module or raw parameter, in the model's order.
        recipes: What the converted ones run, first what most of them do.
        backend: Who runs them.
        chosen: How the backend was chosen.
        attention: One an attention module, where attention was converted too.
        fused: Names of the norms and MLPs that are computed in the linears' kernels.
        not_fused: Why others are not, by name.
    """

    rows: tuple[SurgeryRow, ...]
    recipes: tuple[Recipe, ...]
    backend: str
    chosen: str = ""
    attention: tuple[SurgeryRow, ...] = ()
    fused: tuple[str, ...] = ()
    not_fused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """What most of the converted ones run."""
        return self.recipes[0]

    @property
    def recipe_names(self) -> str:
        """``delayed``, or ``block + delayed``."""
        return " + ".join(sorted({recipe.name for recipe in self.recipes}))

    @property
    def converted(self) -> list[str]:
        """The names of the converted modules."""
        return [row.name for row in self.rows if row.action == "converted"]

    @property
    def skipped(self) -> dict[str, str]:
        """Name -> reason of the weights left in high precision."""
        return {row.name: row.reason for row in self.rows if row.action == "skipped"}

    @property
    def converted_share(self) -> float:
        """The share of all weights that are multiplied that is in converted modules, 0 to 1, by elements."""
        sizes = Counter({"converted": 0, "skipped": 0})
        for row in self.rows:
            sizes[row.action] += row.elements
        return sizes["converted"] / max(1, sizes.total())

    def summary(self) -> str:
        """One line with counts, and one for each reason."""
        lines = [
            f"{len(self.converted)} of {len(self.rows)} weights ({self.converted_share:.1%} of their elements) run the "
            f"{self.recipe_names} recipe{'s' * (len(self.recipes) > 1)} on the {self.backend} backend."
        ]
        if self.fused:
            lines.append(f"  {len(self.fused)} norms and MLPs are computed in their kernels.")
        for reason, count in Counter(self.not_fused.values()).items():
            lines.append(f"  {count} norms are not: {reason}.")
        sizes: Counter[str] = Counter()
        for row in self.rows:
            sizes[row.reason] += row.elements
        for reason, count in Counter(self.skipped.values()).most_common():
            lines.append(f"  {count} in high precision ({sizes[reason]:,} elements): {reason}")
        unused = Counter(row.reason for row in self.rows if row.action == "unused")
        lines += [f"  {count} not multiplied: {reason}" for reason, count in unused.most_common()]
        for (action, reason), count in Counter((row.action, row.reason) for row in self.attention).items():
            lines.append(f"{count} attention modules {action}: {reason}")
        return "\n".join(lines)

    def with_choice(
        self, choice: Mapping[str, Recipe | None], why: Mapping[str, str], wgrad: Wgrad
    ) -> SurgeryReport:
        """With the recipes that a measurement chose for its layers, and by name why not a faster one."""

        def row(old: SurgeryRow) -> SurgeryRow:
            name = old.shared_with or old.name
            if name not in choice:
                return old
            recipe, said = choice[name], f"measured, not {why[name]}" if why.get(name) else "measured"
            if recipe is None:
                return dataclasses.replace(old, action="skipped", reason=said, gemms={})
            runs = Choice(recipe, {"wgrad": wgrad} if wgrad == HIGH_PRECISION else {})
            return dataclasses.replace(old, action="converted", reason=f"{runs}, {said}", gemms=runs.gemms)

        found = most_common_recipes(choice.values()) or self.recipes
        return dataclasses.replace(self, rows=tuple(map(row, self.rows)), recipes=found)

    def table(self) -> str:
        """Every weight in a table; rows that differ only in their block's number share a line."""
        words = {"converted": "", "skipped": "high precision: ", "unused": "not multiplied: "}
        rows = {
            row.name: (" x ".join(map(str, row.shape)), words[row.action] + row.reason) for row in self.rows
        }
        return as_text(("weight of", "shape", "runs"), _merged(rows), title=f"FP8 conversion: {self.backend}")

    def policy_table(self) -> str:
        """The same with the recipe of each GEMM, and the rule that says it or the reason why not."""
        rows = {}
        for row in self.rows:
            runs = (row.gemms.get(gemm, "high_precision") for gemm in GEMMS)
            rows[row.name] = (*runs, row.rule if row.gemms else row.reason)
        return as_text(("weight of", *GEMMS, "because"), _merged(rows))

    def to_dict(self) -> dict[str, object]:
        """Plain values, for loggers; corresponding layers of all blocks share a row.

        As text it is shorter than the 6,000 characters that MLflow keeps of a parameter.
        """
        rows, attention = merged_rows(self.rows), merged_rows(self.attention)
        each = [recipe.to_dict() for recipe in self.recipes]
        found: dict[str, object] = {
            "recipe": each[0] if len(each) == 1 else {"name": self.recipe_names, "recipes": each},
            "backend": self.backend,
            "chosen": self.chosen,
            "converted": len(self.converted),
            "total": len(self.rows),
            "converted_share": self.converted_share,
            "rows": rows,
            "attention": attention,
        }
        if len(str(found)) > MOST_CHARACTERS:  # of odd parts, of which the fewest are left out
            rows.sort(key=lambda row: -row["count"])
        left_out = 0
        while len(str(found)) > MOST_CHARACTERS and (attention or rows):
            left_out += (attention or rows).pop()["count"]
            found["left_out"] = left_out
        return found


def as_text(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> str:
    """A table for a terminal and a log."""
    from io import StringIO

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table(*(Column(name, overflow="fold") for name in columns), title=title)
    for row in rows:
        table.add_row(*map(escape, row))
    out = StringIO()
    Console(file=out, width=140).print(table)
    return out.getvalue()


def _merged(rows: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows by name; of those that differ only in a block's number, one."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, cells in rows.items():
        groups.setdefault((kind_of(name), cells), []).append(name)
    for (_, cells), names in groups.items():
        yield merged_name(names), *cells


def merged_rows(rows: Sequence[SurgeryRow]) -> list[dict[str, Any]]:
    """Rows as plain values; those of one kind that became the same share one, with their ``count``."""
    groups: dict[tuple[str, tuple[int, ...], Action, str, str], list[str]] = {}
    for row in rows:
        key = (kind_of(row.name), row.shape, row.action, row.reason, row.precision)
        groups.setdefault(key, []).append(row.name)
    return [
        {"name": merged_name(names), "count": len(names), "shape": list(shape), "action": action, "reason": reason}
        | ({"precision": precision} if precision else {})
        for (_, shape, action, reason, precision), names in groups.items()
    ]  # fmt: skip


def kind_of(name: str) -> str:
    """``name`` with ``*`` for the numbers in it: the same for corresponding layers of all blocks and experts."""
    return _NUMBER.sub("*", name)


def merged_name(names: Sequence[str]) -> str:
    """``blocks.0.up``, ``blocks.1.up`` and ``blocks.2.up`` as ``blocks.{0-2}.up``; of several numbers the first is shown."""
    pattern = kind_of(names[0])
    if len(names) == 1 or "*" not in pattern:
        return names[0]
    numbers = sorted({int(_NUMBER.findall(name)[0]) for name in names})
    consecutive = numbers == list(range(numbers[0], numbers[-1] + 1))
    said = f"{numbers[0]}-{numbers[-1]}" if consecutive else ",".join(map(str, numbers))
    return pattern.replace("*", f"{{{said}}}", 1)
