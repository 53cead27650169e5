"""What the guard makes of what was observed: alarms, demotions and promotions. No model, no trainer, no clock.

Damage demotes the target it is measured on, by one rung, and again while it lasts. A loss that climbs demotes what shows part of
an alarm; if it climbs on after that (a second alarm within :data:`HORIZON`, measured from the level of the first), or is not
finite twice in a row, it demotes the blocks that gave a sign, or all. A loss that shifts and stays is one alarm, and no demotion.

A demoted target is promoted by one rung once what the rung above would do to its operands, its *shadow*, has been healthy for
``quiet_batches`` of observations in a row: well below what would demote it, and measured each time. That doubles each time the
target has to be demoted again, and begins four times as long where the loss demoted it and no damage said why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from foundry_fp8.observe.divergence.signals import RULES, Signal

__all__ = ["HORIZON", "MODEL", "Decision", "Event", "Observed", "Rungs"]

MODEL = "model"
"""Where the loss is measured."""
HORIZON = 64
"""Observations for which an alarm of the loss or a sign is remembered."""
BLIND = 2
"""Relapses that a demotion without damage begins with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rungs:
    """What one target can run.

    Attributes:
        unit: The block that it is in.
        recipes: Names, from the configured one to ``high_precision``.
    """

    unit: str
    recipes: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """One observation, the same on every rank.

    Attributes:
        loss: Of the batch.
        signs: ``(block, signal)`` -> value.
        damage: ``(target, operand, signal)`` -> value, of what runs in FP8.
        shadow: The same, of what the rung above would do to a demoted target.
        amax: ``(target, operand)`` -> amax.
    """

    loss: float
    signs: Mapping[tuple[str, str], float]
    damage: Mapping[tuple[str, str, str], float]
    shadow: Mapping[tuple[str, str, str], float]
    amax: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What was decided in one batch about one place.

    Attributes:
        unit: A module's name, a block (``layer_003``, ``outside``) or ``model``.
        signal: What raised the alarm (``flushed of x``), or the move (``delayed -> current``).
        why: Of a move: what it is for.
    """

    batch: int
    unit: str
    signal: str
    action: Literal["alarm", "demote", "promote", "checkpoint", "stop"]
    value: float = math.nan
    threshold: float = math.nan
    why: str = ""

    @property
    def detail(self) -> str:
        """What raised the alarm, or why it was moved, in words."""
        if self.action != "alarm":
            return self.why
        # The sums see what no single value does: a slow rise stays below the threshold of a jump.
        rose = "above" if not self.value <= self.threshold else "risen for long, though below"
        return f"{self.value:.4g}, {rose} {self.threshold:.4g}"

    def __str__(self) -> str:
        what = " ".join(part for part in (self.action, self.signal) if part)
        return f"batch {self.batch}, {self.unit}: {what}{self.detail and f' ({self.detail})'}"


class Decision:
    """The rungs of all targets and the past of all signals.

    Args:
        targets: By module name.
        quiet: Observations for which a shadow has to be healthy.
        acts: Whether alarms move anything.
    """

    def __init__(self, targets: Mapping[str, Rungs], *, quiet: int, acts: bool = True) -> None:
        self._targets = dict(targets)
        self._quiet = quiet
        self._acts = acts
        self.rungs = dict.fromkeys(targets, 0)
        self._signals: dict[str, Signal] = {}
        self._told: dict[str, float] = {}
        """Damage that has been told and has not healed, and its worst value so far."""
        self._healthy_for: dict[str, int] = {}
        self._relapses: dict[str, int] = {}
        self._promoted: set[str] = set()
        self._signed: dict[str, int] = {}
        """Blocks by the observation of their last sign."""
        self._climbed: int | None = None
        """Observation of the loss's last alarm."""
        self._broken = 0
        """Observations in a row whose loss was not finite."""
        self._count = 0

    def recipe(self, target: str) -> str:
        """What it runs, in words."""
        return self._targets[target].recipes[self.rungs[target]]

    def decide(self, batch: int, seen: Observed) -> list[Event]:
        """Take one observation; what to tell and to do, in order. :attr:`rungs` are those from now on."""
        self._count += 1
        alarms, sick = self._damage(batch, seen.damage)
        alarms += self._signs(batch, seen.signs)
        climbs = self._loss(batch, seen.loss)
        alarms += climbs
        moves = [self._demote(batch, target, why) for target, why in sick.items()] if self._acts else []
        if self._acts and climbs:
            moves += self._answer_the_loss(batch, set(sick))
        if self._acts:
            moved = {move.unit for move in moves if move is not None}
            # The shadow of what was moved just now is that of another rung.
            moves += self._promote(batch, {w: v for w, v in seen.shadow.items() if w[0] not in moved})
        return alarms + [move for move in moves if move is not None]

    # -- what is wrong -----------------------------------------------------------------------------------------------

    def _damage(
        self, batch: int, damage: Mapping[tuple[str, str, str], float]
    ) -> tuple[list[Event], dict[str, str]]:
        events: list[Event] = []
        sick: dict[str, str] = {}
        for (target, operand, name), value in damage.items():
            if not math.isfinite(value):  # the loss and the signs tell of it, and no precision mends it
                continue
            key = f"{target}/{operand}/{name}/{self.recipe(target)}"
            configured = f"{target}/{operand}/{name}/{self._targets[target].recipes[0]}"
            signal = self._signal(key, name, like=self._signals.get(configured))
            threshold = signal.threshold
            if signal.observe(value):
                what = f"{name} of {operand}"
                sick.setdefault(target, f"{what} {value:.3g}, above {threshold:.3g}")
                if value > self._told.get(key, 0.0) * signal.rule.ratio:
                    self._told[key] = value
                    events.append(Event(batch=batch, unit=target, signal=what, action="alarm", value=value, threshold=threshold))  # fmt: skip
            elif key in self._told and signal.healthy(value):
                del self._told[key]
        return events, sick

    def _signs(self, batch: int, signs: Mapping[tuple[str, str], float]) -> list[Event]:
        events = []
        for (unit, name), value in signs.items():
            key = f"{unit}/{name}"
            signal = self._signal(key, name)
            threshold = signal.threshold
            broken = not math.isfinite(value)
            if signal.observe(value) and not (broken and key in self._told):
                events.append(Event(batch=batch, unit=unit, signal=name, action="alarm", value=value, threshold=threshold))  # fmt: skip
                self._signed[unit] = self._count
            self._tell_once(key, broken)
        return events

    def _loss(self, batch: int, loss: float) -> list[Event]:
        signal = self._signal(f"{MODEL}/loss", "loss")
        threshold, broken = signal.threshold, not math.isfinite(loss)
        alarm = signal.observe(loss)
        self._broken = self._broken + 1 if broken else 0
        told = broken and f"{MODEL}/loss" in self._told and self._broken > 2
        self._tell_once(f"{MODEL}/loss", broken)
        if not alarm or told:
            return []
        return [Event(batch=batch, unit=MODEL, signal="loss", action="alarm", value=loss, threshold=threshold)]  # fmt: skip

    def _tell_once(self, key: str, broken: bool) -> None:
        if broken:
            self._told[key] = math.inf
        else:
            self._told.pop(key, None)

    def _signal(self, key: str, name: str, like: Signal | None = None) -> Signal:
        if key not in self._signals:
            self._signals[key] = Signal(RULES[name], like)
        return self._signals[key]

    # -- what to do --------------------------------------------------------------------------------------------------

    def _answer_the_loss(self, batch: int, sick: set[str]) -> list[Event | None]:
        """After an alarm of the loss: what shows part of an alarm; if it goes on, the blocks with a sign, or all."""
        again = self._climbed is not None and self._count - self._climbed <= HORIZON
        self._climbed = self._count
        moves: list[Event | None] = []
        for key, signal in self._signals.items():
            target, _, rest = key.partition("/")
            if signal.suspect and target in self._targets and target not in sick:
                operand, name, _ = rest.split("/")
                sick.add(target)
                moves.append(self._demote(batch, target, f"the loss rose, and {name} of {operand} did"))
        if self._broken > 1 or (again and not self._broken):
            why = "the loss is not finite" if self._broken else "the loss climbs on"
            units = {unit for unit, seen in self._signed.items() if self._count - seen <= HORIZON}
            signed = [t for t, rungs in self._targets.items() if rungs.unit in units and self._can_fall(t)]
            for target in signed or self._targets:
                if target not in sick:
                    self._relapses[target] = max(self._relapses.get(target, 0), BLIND)
                    moves.append(self._demote(batch, target, why))
        return moves

    def _can_fall(self, target: str) -> bool:
        return self.rungs[target] + 1 < len(self._targets[target].recipes)

    def _demote(self, batch: int, target: str, why: str) -> Event | None:
        self._healthy_for[target] = 0
        if not self._can_fall(target):
            return None
        if target in self._promoted:
            self._promoted.discard(target)
            self._relapses[target] = self._relapses.get(target, 0) + 1
        return self._move(batch, target, +1, why)

    def _promote(self, batch: int, shadow: Mapping[tuple[str, str, str], float]) -> list[Event | None]:
        health: dict[str, bool] = {}
        for (target, operand, name), value in shadow.items():
            if self.rungs[target]:
                above = self._targets[target].recipes[self.rungs[target] - 1]
                healthy = self._signal(f"{target}/{operand}/{name}/{above}", name).healthy(value)
                health[target] = health.get(target, True) and healthy
        moves: list[Event | None] = []
        for target, rung in self.rungs.items():
            if not rung:
                continue
            self._healthy_for[target] = self._healthy_for.get(target, 0) + 1 if health.get(target) else 0
            patience = self._quiet * 2 ** self._relapses.get(target, 0)
            quiet = self._climbed is None or self._count - self._climbed >= patience
            if self._healthy_for[target] >= patience and quiet:
                self._healthy_for[target] = 0
                self._promoted.add(target)
                why = f"its shadow was healthy for {patience} observations"
                moves.append(self._move(batch, target, -1, why))
        return moves

    def _move(self, batch: int, target: str, step: int, why: str) -> Event:
        before = self.recipe(target)
        self.rungs[target] += step
        return Event(
            batch=batch,
            unit=target,
            signal=f"{before} -> {self.recipe(target)}",
            action="demote" if step > 0 else "promote",
            why=why,
        )

    # -- resuming ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Numbers and strings only."""
        return {
            "rungs": {target: [rung, self.recipe(target)] for target, rung in self.rungs.items()},
            "signals": {key: signal.state_dict() for key, signal in self._signals.items()},
            "told": dict(self._told),
            "healthy_for": dict(self._healthy_for),
            "relapses": dict(self._relapses),
            "promoted": sorted(self._promoted),
            "signed": dict(self._signed),
            "climbed": self._climbed,
            "broken": self._broken,
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Take back what :meth:`state_dict` gave.

        Returns:
            A sentence for each target that runs something else than it did, because what it ran is none of its rungs now: it goes
            on one rung below what is configured.
        """
        said = []
        for target, (rung, recipe) in state["rungs"].items():
            names = list(self._targets[target].recipes)
            self.rungs[target] = 0 if not rung else names.index(recipe, 1) if recipe in names[1:] else 1
            self.rungs[target] = min(self.rungs[target], len(names) - 1)
            if rung and self.recipe(target) != recipe:
                said.append(f"{target} ran {recipe}, now {self.recipe(target)}")
        for key, saved in state["signals"].items():
            name = key.split("/")[2 if key.split("/")[0] in self._targets else 1]
            if name in RULES:
                self._signal(key, name).load_state_dict(saved)
        self._told, self._healthy_for = dict(state["told"]), dict(state["healthy_for"])
        self._relapses, self._promoted = dict(state["relapses"]), set(state["promoted"])
        self._signed, self._climbed = dict(state["signed"]), state["climbed"]
        self._broken, self._count = state["broken"], state["count"]
        return said
