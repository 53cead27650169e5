"""What quantisation does to a run's operands, step by step, in any loop."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from foundry_fp8.config import Config, Natural, Positive, from_mapping
from foundry_fp8.model_structure.blocks import block_index_of, transformer_blocks
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.observe.operand_health import ATTENTION, LINEAR, Health, HealthProbe, Operand

__all__ = ["HealthConfig", "HealthMeter", "HealthReport"]

log = logging.getLogger(__name__)

KEY = "callbacks.fp8_monitor"

ByOperand = Mapping[Operand, Mapping[str, Health]]
LOWER_IS_WORSE = ("sqnr_db",)
FIGURES = tuple(field.name for field in dataclasses.fields(Health))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthConfig(Config):
    """The options of the meter in every trainer."""

    key = KEY

    interval: Positive = 10
    """Batches between two measurements. Nothing is measured in the batches between."""
    worst: Natural = 5
    """Log every figure of the linears with the lowest SQNR as a table, this many for each operand."""


@dataclasses.dataclass(frozen=True)
class HealthReport:
    """One measurement: what to log, its details, and the rows of the worst linears (``COLUMNS``)."""

    COLUMNS = ("operand", "linear", *FIGURES)

    metrics: dict[str, float]
    details: dict[str, float]
    worst: list[list[Any]]


class HealthMeter:
    """Measures what quantisation does to ``x``, ``w`` and ``dy`` of every converted linear, and to ``q``, ``k``, ``v`` and ``do`` of every
    converted attention, on this rank.

    Works with every backend that calls the linear's probe. Call :meth:`begin` before a step's first forward and :meth:`end` after it.
    Each due step costs a few passes over each operand, and one copy of the results to the host.

    Args:
        model: As it is trained, wrapped or not.
        guarded: Wraps each hook (:meth:`foundry_fp8.callbacks.base.Monitor.guarded`).
        **options: The fields of :class:`HealthConfig`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        guarded: Callable[[Callable[..., None]], Callable[..., None]] = lambda hook: hook,
        **options: Any,
    ) -> None:
        self.config: HealthConfig = from_mapping(HealthConfig, options, KEY)
        self._probe = HealthProbe(model, guarded)
        blocks = [(clean_name(name), block) for name, block in transformer_blocks(model)]
        self._layers = {name: block_index_of(name, blocks) for name in self._probe.modules}
        self._due = False
        self._scales: dict[tuple[str, Operand], tuple[float, int]] = {}
        """Last scale seen, and the step in which it was first seen."""
        if not self._probe.modules:
            said = "%s: the model has no FP8 linear, so nothing is measured. Is `algorithms.fp8` in the YAML?"
            log.warning(said, KEY)

    def begin(self, finished: int) -> None:
        """Start measuring if this step is due; ``finished``: the steps before it."""
        self._due = (finished + 1) % self.config.interval == 0
        if self._due:
            self._probe.attach()

    def end(self, finished: int) -> HealthReport | None:
        """Stop measuring; what was found, if anything. ``finished``: this step included."""
        if not self._due:
            return None
        self._due = False
        self._probe.detach()
        all_found, operands = self._probe.collect(), (*LINEAR, *ATTENTION)
        found = {o: {name: one for (name, op), one in all_found.items() if op == o} for o in operands}
        found = {operand: of_operand for operand, of_operand in found.items() if of_operand}
        return HealthReport(*self._metrics(found, finished), self._worst_rows(found)) if found else None

    def detach(self) -> None:
        """Stop measuring."""
        self._probe.detach()

    def _metrics(self, found: ByOperand, batch: int) -> tuple[dict[str, float], dict[str, float]]:
        metrics: dict[str, float] = {}
        details: dict[str, float] = {}
        for operand, of_operand in found.items():
            for stat in ("saturated", "flushed", "sqnr_db"):
                values = {name: getattr(health, stat) for name, health in of_operand.items()}
                # Attention's go where linears' do not crowd them out of what every logger takes.
                of_logger = metrics if operand in LINEAR else details
                of_logger[f"fp8/{stat}/{operand}/worst"] = _worst(stat, values.values())
                details[f"fp8/{stat}/{operand}/mean"] = _mean(values.values())
                details |= self._by_layer(f"fp8/{stat}/{operand}", stat, values)
            ages = self._ages(operand, of_operand, batch)
            if ages:
                details[f"fp8/scale_age/{operand}/mean"] = _mean(ages)
                details[f"fp8/scale_age/{operand}/worst"] = max(ages)
        return metrics, details

    def _worst_rows(self, found: ByOperand) -> list[list[Any]]:
        rows: list[list[Any]] = []
        for operand, of_operand in found.items():
            sqnr = {n: one.sqnr_db for n, one in of_operand.items()}  # NaN is the worst
            worst = sorted(sqnr, key=lambda n: (not math.isnan(sqnr[n]), sqnr[n]))[: self.config.worst]
            rows += [[operand, name, *dataclasses.astuple(of_operand[name])] for name in worst]
        return rows

    def _by_layer(self, prefix: str, stat: str, values: Mapping[str, float]) -> dict[str, float]:
        layers: dict[int, list[float]] = defaultdict(list)
        for name, value in values.items():
            layer = self._layers[name]
            if layer is not None:
                layers[layer].append(value)
        return {f"{prefix}/layer_{layer:03d}": _worst(stat, found) for layer, found in sorted(layers.items())}

    def _ages(self, operand: Operand, found: Mapping[str, Health], batch: int) -> list[float]:
        """Batches for which each delayed scale has been seen unchanged (to the monitor's interval)."""
        ages = []
        for name, health in found.items():
            where, recipe = (name, operand), self._probe.modules[name].recipe
            if recipe is None or not recipe.uses_history:
                continue
            scale, since = self._scales.get(where, (math.nan, batch))
            if health.scale != scale:
                since = batch
            self._scales[where] = health.scale, since
            ages.append(float(batch - since))
        return ages


def _worst(stat: str, values: Iterable[float]) -> float:
    """NaN is worse than anything."""
    found = list(values)
    if any(math.isnan(value) for value in found):
        return math.nan
    return min(found) if stat in LOWER_IS_WORSE else max(found)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
