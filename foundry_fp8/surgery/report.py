"""The report of a conversion: what became of every module, and why."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from foundry_fp8.numerics.recipes import Recipe

__all__ = ["SurgeryReport", "SurgeryRow"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurgeryRow:
    """What became of one module."""

    name: str
    action: Literal["converted", "skipped"]
    reason: str
    """Why it was skipped; for a converted one, what it became."""
    in_features: int = 0
    out_features: int = 0
    fused_with: str = ""
    """The norm that is computed in its kernel, if any."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurgeryReport:
    """Every linear of the model: what it became, and why the others did not.

    Attributes:
        rows: One a module, in the model's order.
        recipe: What the converted ones run.
        backend: Who runs them.
        chosen: How the backend was chosen.
        attention: One an attention module, where attention was converted too.
    """

    rows: tuple[SurgeryRow, ...]
    recipe: Recipe
    backend: str
    chosen: str = ""
    attention: tuple[SurgeryRow, ...] = ()

    @property
    def converted(self) -> list[str]:
        """The names of the converted modules."""
        return [row.name for row in self.rows if row.action == "converted"]

    @property
    def skipped(self) -> dict[str, str]:
        """Name -> reason of the modules left in high precision."""
        return {row.name: row.reason for row in self.rows if row.action == "skipped"}

    @property
    def converted_share(self) -> float:
        """The share of all linear weights that is in converted modules, 0 to 1."""
        sizes = Counter({"converted": 0, "skipped": 0})
        for row in self.rows:
            sizes[row.action] += row.in_features * row.out_features
        return sizes["converted"] / max(1, sizes.total())

    def summary(self) -> str:
        """One line with counts, and one for each reason."""
        lines = [
            f"{len(self.converted)} of {len(self.rows)} linear layers ({self.converted_share:.1%} of their weights) run "
            f"the {self.recipe.name} recipe on the {self.backend} backend."
        ]
        fused = sum(1 for row in self.rows if row.fused_with)
        if fused:
            lines.append(f"  {fused} of them compute the norm before them in the same kernel.")
        for reason, count in Counter(self.skipped.values()).most_common():
            lines.append(f"  {count} in high precision: {reason}")
        for (action, reason), count in Counter((row.action, row.reason) for row in self.attention).items():
            lines.append(f"{count} attention modules {action}: {reason}")
        return "\n".join(lines)

    def table(self) -> str:
        """Every linear in a table; layers that differ only in their block's number share a line."""
        from io import StringIO

        from rich.console import Console
        from rich.table import Table

        groups: dict[tuple[str, ...], list[SurgeryRow]] = {}
        for row in self.rows:
            shape = f"{row.out_features} x {row.in_features}"
            groups.setdefault((_NUMBER.sub("*", row.name), shape, row.action, row.reason), []).append(row)
        table = Table("linear", "out x in", "runs", title=f"FP8 conversion: {self.backend}")
        for (name, shape, action, reason), rows in groups.items():
            runs = reason if action == "converted" else f"high precision: {reason}"
            table.add_row(_merged_name(name, rows), shape, runs)
        out = StringIO()
        Console(file=out, width=140).print(table)
        return out.getvalue()

    def to_dict(self) -> dict[str, object]:
        """Plain values, for loggers."""
        return {
            "recipe": self.recipe.to_dict(),
            "backend": self.backend,
            "chosen": self.chosen,
            "converted": len(self.converted),
            "converted_share": self.converted_share,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "attention": [dataclasses.asdict(row) for row in self.attention],
        }


def _merged_name(pattern: str, rows: Sequence[SurgeryRow]) -> str:
    """``blocks.*.up`` of blocks 0, 1, 2 as ``blocks.{0-2}.up``; the number shown is the first one of the name."""
    if len(rows) == 1 or "*" not in pattern:
        return rows[0].name
    numbers = sorted({int(_NUMBER.findall(row.name)[0]) for row in rows})
    consecutive = numbers == list(range(numbers[0], numbers[-1] + 1))
    said = f"{numbers[0]}-{numbers[-1]}" if consecutive else ",".join(map(str, numbers))
    return pattern.replace("*", f"{{{said}}}", 1)
