"""The divergence guard for any training loop."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foundry_fp8.config import from_mapping
from foundry_fp8.distributed.attendance import RanksLost
from foundry_fp8.layers.model_state import readable
from foundry_fp8.numerics.recipes import Recipe, recipe_name
from foundry_fp8.observe.guard.config import KEY, MODEL, Event, GuardConfig
from foundry_fp8.observe.guard.schedule import Schedule
from foundry_fp8.observe.precision_probe import (
    LossOf,
    OutOfMemory,
    PrecisionGap,
    PrecisionProbe,
    Recipes,
    first_rows,
)
from foundry_fp8.observe.switched_off import SwitchesOff

__all__ = ["DivergenceGuard", "smallest_sufficient"]

log = logging.getLogger(__name__)

VERSION = 2
"""Of the saved state."""
WELL = 0.5
"""Share of the limits below which the errors are after a demotion, and with all layers back in FP8 before a return."""

Measure = Callable[[Recipes], PrecisionGap]


class DivergenceGuard(SwitchesOff):
    """Measures what FP8 does to the loss and the gradients, and demotes the layers that do too much to them.

    Call :meth:`before_step` before the first forward of each batch and :meth:`after_step` after it, on every rank; save
    :meth:`state_dict`. Once it has measured, an error in a measurement switches it off, and training goes on.

    Args:
        model: Converted by :func:`~foundry_fp8.apply_fp8`, wrapped or not.
        loss_of: ``loss_of(model, batch)``, the scalar loss of a training forward, under training's autocast.
        **options: The fields of :class:`~.config.GuardConfig`.

    Attributes:
        events: Every alarm and action so far, as mappings.
        gap: What was measured on this batch, or ``None``; ``probe.passes`` counts what it cost.
    """

    name = KEY

    def __init__(self, model: nn.Module, loss_of: LossOf, **options: Any) -> None:
        self.config: GuardConfig = from_mapping(GuardConfig, options, KEY)
        self.rows = self.config.rows
        self.probe = PrecisionProbe(model, lambda model, batch: loss_of(model, first_rows(batch, self.rows)))
        self.events: list[dict[str, Any]] = []
        self.gap: PrecisionGap | None = None
        self.batch = 0
        self.schedule = Schedule(self.config.interval)
        self._healthy = 0  # measurements in turn below WELL with all demoted layers back in FP8
        self._returns = 0
        self._off, self._spent, self._proven = not self.probe.layers, 0, False
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if self._off:
            log.warning("%s: the model has no FP8 layer, so there is nothing to guard.", KEY)

    @property
    def demoted(self) -> list[str]:
        """The layers that do not run what they were converted with."""
        return [name for name, layer in self.probe.layers.items() if layer.recipe != layer.configured_recipe]

    def finer(self, name: str) -> Recipe | None:
        """What a layer is demoted to before high precision, if anything (:attr:`Recipe.finer <foundry_fp8.numerics.recipes.Recipe.finer>`)."""
        layer = self.probe.layers[name]
        configured = layer.configured_recipe
        finer = None if configured is None or not self.config.finer else configured.finer
        return None if finer is None or not layer.can_run(finer, self._device) else finer

    def due(self) -> bool:
        """Whether the next :meth:`before_step` measures."""
        return not self._off and self.schedule.due(self.batch)

    def before_step(self, batch: Any) -> list[Event]:
        """Measure on ``batch`` if it is due, and act; returns what was found and done. FSDP1 must hold no gradients."""
        self.gap = None
        if not self.due():
            return []
        self.probe.attendance.when, self._spent = f" ({KEY}), batch {self.batch}", self.probe.passes
        try:
            with self.probe.on(batch) as measure:
                found, recipes = self._decide(measure)
        except OutOfMemory as error:
            self._off = self.rows == 1
            self.rows = max(1, self.rows // 2)
            goes_on = "FP8 is not measured any more" if self._off else f"goes on with {self.rows} rows"
            log.warning("%s.rows: %s; %s.", KEY, error, goes_on)
            return []
        except Exception as error:
            if isinstance(error, RanksLost) or not self._proven:
                raise
            self._off = True
            self.disable(error)
            return []
        self._proven = True
        for name, recipe in recipes.items():  # only now: the measurement put back those that it found
            self.probe.layers[name].set_recipe(recipe)  # type: ignore[arg-type]
        self.events += map(dataclasses.asdict, found)
        if found:
            log.warning("%s: %s.", KEY, _in_one_line(found))
        return found

    def after_step(self, loss: float | Tensor) -> None:
        """The loss of the batch, the same on every rank; a jump has the next batch measured."""
        self.schedule.see_loss(float(loss))
        self.batch += 1

    def severity(self, gap: PrecisionGap) -> float:
        """The larger of the two errors, each as a share of its limit."""
        worst = max(gap.loss_gap / self.config.loss_limit, gap.worst[1] / self.config.gradient_limit)
        return worst if math.isfinite(gap.loss_gap) else math.inf

    def metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """What to log of the measurement on this batch, and its details by block; empty if there was none."""
        if self.gap is None:
            return {}, {}
        metrics = {
            "fp8_error/loss_gap": self.gap.loss_gap,
            "fp8_error/gradient/worst": self.gap.worst[1],
            "guard/demoted_layers": float(len(self.demoted)),
            "guard/alarms": float(sum(event["action"] == "alarm" for event in self.events)),
        }
        errors = self.gap.block_error.items()
        return metrics, {f"fp8_error/gradient/{block}": error for block, error in errors}

    def _decide(self, measure: Measure) -> tuple[list[Event], Recipes]:
        running = self.probe.running()
        gap = self.gap = measure(running)
        if not gap.meaningful:
            return [], {}
        severity = self.severity(gap)
        if self.schedule.alarm(severity):
            found = [self._alarm(gap)]
            if "stop" in self.config.actions:
                found.append(Event(self.batch, MODEL, "stop"))
            moves = self._demotion(measure, running) if "demote" in self.config.actions else {}
            return found + self._events("demote", running, moves), moves
        if self.demoted and severity < WELL and self.schedule.in_turn(self.batch):
            moves = self._return(measure, running)
            return self._events("return", running, moves), moves
        return [], {}

    def _demotion(self, measure: Measure, running: Recipes) -> Recipes:
        """The fewest layers without which the errors are well below the limits, and as few of them in high precision as that allows."""

        def well(changed: Recipes) -> bool:
            return self.severity(measure({**running, **changed})) < WELL

        in_fp8 = [name for name, recipe in running.items() if recipe is not None]
        at_fault = smallest_sufficient(
            in_fp8, lambda names: well(dict.fromkeys(names)), questions=self._left()
        )
        finer = {name: self.finer(name) for name in at_fault}
        finer = {name: recipe if recipe != running[name] else None for name, recipe in finer.items()}
        high = smallest_sufficient(
            at_fault, lambda names: well({**finer, **dict.fromkeys(names)}), questions=self._left()
        )
        self._healthy = 0
        return {**finer, **dict.fromkeys(high)}

    def _left(self) -> int:
        """Passes that this batch may still cost."""
        return max(0, self.config.passes - (self.probe.passes - self._spent))

    def _return(self, measure: Measure, running: Recipes) -> Recipes:
        """All demoted layers, once FP8 has measured well in all of them together for long enough."""
        configured = {name: self.probe.layers[name].configured_recipe for name in self.demoted}
        well = self.severity(measure({**running, **configured})) < WELL
        self._healthy = self._healthy + 1 if well else 0
        quiet = math.ceil(self.config.quiet_batches / self.config.interval) * 2**self._returns
        if self._healthy < quiet:
            return {}
        self._returns += 1
        return configured

    def _alarm(self, gap: PrecisionGap) -> Event:
        (block, error), limits = gap.worst, self.config
        if error / limits.gradient_limit > gap.loss_gap / limits.loss_limit:
            unit, signal, value, limit = block, "gradient", error, limits.gradient_limit
        else:  # NaN too
            unit, signal, value, limit = MODEL, "loss", gap.loss_gap, limits.loss_limit
        said = f"FP8 changes the {signal} by {value:.2%}, limit {limit:.2%}"
        return Event(self.batch, unit, "alarm", signal, value, limit, said)

    def _events(self, action: Literal["demote", "return"], running: Recipes, moves: Recipes) -> list[Event]:
        changes = {
            name: f"{recipe_name(running[name])} -> {recipe_name(recipe)}" for name, recipe in moves.items()
        }
        return [Event(self.batch, unit, action, change) for unit, change in changes.items()]

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and mappings."""
        recipes = {name: recipe_name(layer.recipe) for name, layer in self.probe.layers.items()}
        waiting = ((n, getattr(m, "demoted", "")) for n, m in self.probe.layers.items() if m.configured_recipe is None)  # fmt: skip
        recipes |= {name: demoted for name, demoted in waiting if demoted}
        return {"version": VERSION, "batch": self.batch, "rows": self.rows, "recipes": recipes, "healthy": self._healthy,
                "returns": self._returns, "schedule": self.schedule.state_dict(), "events": list(self.events)}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave. State of an older guard or of another model is left unused, with a warning."""
        with readable("guard"):
            ours = state.get("version") == VERSION and state["recipes"].keys() == self.probe.layers.keys()
        if not ours:
            log.warning("%s: the saved state is of an older guard or other layers; it starts anew.", KEY)
            return
        with readable("guard"):
            counts = "batch", "rows", "healthy", "returns"
            batch, rows, healthy, returns = (int(state[name]) for name in counts)
            events = [dict(event) for event in state["events"]]
            self.schedule.load_state_dict(state["schedule"])
        for name, saved in state["recipes"].items():
            layer = self.probe.layers[name]
            known = {recipe_name(recipe): recipe for recipe in (self.finer(name), layer.configured_recipe)}
            layer.set_recipe(known.get(str(saved)))  # type: ignore[arg-type]
            if layer.configured_recipe is None:
                layer.demoted = saved if saved in ("finer", "out") else ""  # type: ignore[union-attr]
        self.batch, self.events, self.rows = batch, events, min(self.config.rows, rows)
        self._healthy, self._returns = healthy, returns


def _in_one_line(events: list[Event]) -> str:
    """The first three of each action, and how many there are."""
    by_action: dict[str, list[Event]] = {}
    for event in events:
        by_action.setdefault(event.action, []).append(event)
    return "; ".join(
        f"{'; '.join(map(str, alike[:3]))}{f' and {len(alike) - 3} more' if len(alike) > 3 else ''}"
        for alike in by_action.values()
    )


def smallest_sufficient(
    names: Sequence[str], sufficient: Callable[[Sequence[str]], bool], *, questions: int = 64
) -> list[str]:
    """A part of ``names`` that is sufficient, and is not once any of it is left out, by bisection.

    U. Junker, "QuickXplain", AAAI 2004. Of n with k at fault: 2 k log2(n / k) + 2 k questions.

    Args:
        names: In the order of the model, as neighbours are asked about together. All of them are sufficient; that is not asked.
        sufficient: The question.
        questions: After so many, what is undivided stays whole.
    """
    left = questions

    def within(candidates: Sequence[str], given: Sequence[str], *, ask: bool) -> list[str]:
        """The part of ``candidates`` that is needed beside ``given``."""
        nonlocal left
        left -= ask
        if ask and left >= 0 and sufficient(given):
            return []
        if len(candidates) == 1 or left <= 0:
            return list(candidates)
        first, second = candidates[: len(candidates) // 2], candidates[len(candidates) // 2 :]
        of_second = within(second, [*given, *first], ask=True)
        return within(first, [*given, *of_second], ask=bool(of_second)) + of_second

    return within(names, [], ask=True) if names else []
