"""What the guard makes of what was observed: alarms, demotions and promotions. No model, no trainer, no clock.

Damage demotes the target it is measured on, by one rung, and again while it lasts. A finer rung has to help: where an operand is not
healthy on it for :data:`TRIAL` looks in a row, or the loss stays up, the next one is taken. A loss that climbs demotes what
shows part of an alarm; if it climbs on after that (a second alarm within :data:`HORIZON`, and a trend since the first), or is
not finite twice in a row, it demotes the blocks that gave a sign, or all. A loss that shifts and stays is one alarm, and no
demotion, however often. What is counted over all batches (clipped passes) demotes to high precision: a finer rung cannot be tried on
batches that observations miss.

Where one look decides (half of an alarm has come together, a rung is on trial, or the one operand that was looked at between two
observations is sick), the next batch is looked at too: sampling more often when something may be wrong is what charts with
variable sampling intervals do. Once one operand has been sick whatever its past in two batches running, others that are so in the
second one need no more. What is sick whatever its past twice within :data:`WITHIN` batches is damage too, well as it may be between
them: after the first of both these batches are looked at.

A young run, of fewer than :data:`~foundry_fp8.observe.divergence.change_point.WARMUP` due observations, is in transit: what is sick in it
has to be so in :data:`TRIAL` due observations in a row, and clipped passes are not judged. Weights that begin as zeros have rows that are
alike in the first steps, and activations outgrow short histories while a rate warms up.

Operands tell, and products decide: what an operand loses demotes nothing while the products that it is in are well. Training feels those, and an
operand may lose much that they do not need. What linears and attentions cost of the loss counts only where all together cost too much of it
(:class:`~foundry_fp8.observe.divergence.cost_watch.CostWatch`).

A demoted target is promoted by one rung once what the rung above would do to its operands, its *shadow*, has been healthy for
``quiet_batches`` of observations in a row: well below what would demote it, each operand and number that was measured there measured
each time, and the loss back below where its last alarm was (for :data:`HORIZON` observations; what it is then is its level): a finer
rung may have been left because of the loss, and no shadow tells of that. That doubles each time the
target has to be demoted again, and begins four times as long where the loss demoted it and no damage said why.

Source:
    Reynolds, Amin and Arnold, "CUSUM charts with variable sampling intervals", Technometrics 32 (1990).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from foundry_fp8.observe.divergence.change_point import WARMUP
from foundry_fp8.observe.divergence.cost_watch import SAFE, CostWatch
from foundry_fp8.observe.divergence.loss_watch import HORIZON, LossWatch, Rise
from foundry_fp8.observe.divergence.observed import MODEL, Event, Observed, Rungs
from foundry_fp8.observe.divergence.resuming import taken
from foundry_fp8.observe.divergence.signals import RULES, Signal

__all__ = ["Decision"]

BLIND = 2
"""Relapses that a demotion without damage begins with."""
WITHIN = 12
"""Batches within which a second sick one is no coincidence."""
FEEDS = {"x": ("y", "dw"), "w": ("y", "dx"), "dy": ("dx", "dw"), "q": ("qk",), "k": ("qk",), "v": ("o",)}
"""The products of a linear or of an attention that an operand is in."""
OUTPUTS = {"y": "y", "qk": "o", "o": "o"}
"""Where the error of a product is felt, whose cost is asked."""
PRODUCTS = ("product_noise", "product_noise_gradient", "logit_noise")
"""Their signals."""
LOST = ("flushed", "flushed_gradient", "noise", "noise_gradient")
"""Those of operands."""
BORNE = (*LOST, *PRODUCTS)
"""What demotes nothing while somebody else says that it is well."""
TRIAL = 3
"""Looks at a finer rung in which it has to help, and looks out of turn in a row."""


class Decision:
    """The rungs of all targets and the past of all signals.

    Args:
        targets: By module name.
        quiet: Observations for which a shadow has to be healthy.
        acts: Whether alarms move anything.

    Attributes:
        rungs: By target.
        look_again: Whether the next batch is to be observed, due or not.
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
        self._loss = LossWatch()
        self._cost = CostWatch()
        self._count = 0
        self._unwell: dict[str, int] = {}
        """Looks in a row in which a target was not healthy on its finer rung."""
        self._trial: dict[str, int] = {}
        """Looks that are left to a rung on trial."""
        self._looks = 0
        """Looks out of turn in a row."""
        self._met: dict[str, int] = {}
        """Batch in which damage was sick whatever its past, last."""
        self._lasting: dict[str, int] = {}
        """Due observations in a row in which damage was, in a young run."""
        self.look_again = False

    @property
    def young(self) -> bool:
        """Whether the run is in transit."""
        return self._count < WARMUP

    def recipe(self, target: str) -> str:
        """What it runs, in words."""
        return self._targets[target].recipes[self.rungs[target]]

    def decide(self, batch: int, seen: Observed, *, due: bool = True) -> list[Event]:
        """Take one observation; what to tell and to do, in order. :attr:`rungs` are those from now on.

        Args:
            batch: For the events.
            seen: What was observed.
            due: Whether it was its turn. If not, only what is in doubt is judged.
        """
        self._count += due
        gradients = {unit: value for (unit, name), value in seen.signs.items() if name == "gradient_norm"}
        self._cost.observe(seen.loss_cost, gradients, due=due)
        alarms, sick = self._damage(batch, self._cost.counted(seen.damage, self._cost.ahead), due)
        rise = None
        if due:
            alarms += self._signs(batch, seen.signs)
            rise = self._loss.observe(seen.loss)
        else:
            self._loss.look(seen.loss)
        if rise is not None:
            event = Event(batch=batch, unit=MODEL, signal="loss", action="alarm", value=seen.loss, threshold=rise.threshold)  # fmt: skip
            hurt = sick or any(self._signals[key].suspect or key in self._told for key in self._watched())
            if self._targets and not hurt:
                event = dataclasses.replace(
                    event, why=f"{event.detail}; no operand is damaged: hardly FP8's doing"
                )
            alarms.append(event)
        self._judge_trials(seen.loss, sick)
        moves = [self._demote(batch, target, why) for target, why in sick.items()] if self._acts else []
        if self._acts and rise is not None:
            moves += self._answer_the_loss(batch, set(sick), rise)
        if self._acts and due:
            moved = {move.unit for move in moves if move is not None}
            total = (seen.loss_cost + seen.shadow_cost) / self._cost.weight
            shadow = self._cost.counted(seen.shadow, total, SAFE)
            # That of what was moved just now is of another rung.
            moves += self._promote(batch, {w: v for w, v in shadow.items() if w[0] not in moved})
        found = [move for move in moves if move is not None]
        self._plan(batch, due, found)
        return alarms + found

    def pulse(self, batch: int, damage: Mapping[tuple[str, str, str], float]) -> None:
        """Take a look at few operands between two observations; one that is sick whatever its past has the next batches observed."""
        for (target, operand, name), value in self._cost.counted(damage, math.inf).items():
            key, signal = self._of_operand(target, operand, name, self.recipe(target))
            if signal.sick(value) and key not in self._told:
                signal.observe(value)
                self._meet(batch, key)
                self.look_again = True

    def _meet(self, batch: int, key: str) -> bool:
        """Take note of what is sick whatever its past; whether it was of late. The first batches of a run may all be so."""
        if self.young:
            return False
        before = self._met.get(key)
        self._met[key] = batch
        return before is not None and 0 < batch - before <= WITHIN

    def _plan(self, batch: int, due: bool, moves: Sequence[Event]) -> None:
        """Whether to look again in the next batch, and what is on trial then."""
        for move in moves:
            self._unwell.pop(move.unit, None)
            self._trial.pop(move.unit, None)
            if move.action == "demote" and self._can_fall(move.unit):
                self._trial[move.unit] = TRIAL
        self._looks = 0 if due or moves else self._looks + 1
        untold = [key for key in self._watched() if key not in self._told]
        doubt = any(self._signals[key].test.fast > 0.5 for key in untold)
        of_late = any(batch < self._met.get(key, -WITHIN) + WITHIN for key in untold)
        in_doubt = self._looks < TRIAL and (doubt or bool(self._trial) or bool(self._unwell))
        self.look_again = of_late or in_doubt

    def _watched(self) -> list[str]:
        """The signals of damage by what runs now."""
        return [
            key
            for key in self._signals
            if (target := key.partition("/")[0]) in self._targets
            and key.rpartition("/")[2] == self.recipe(target)
        ]

    # -- what is wrong -----------------------------------------------------------------------------------------------

    def _damage(
        self, batch: int, damage: Mapping[tuple[str, str, str], float], due: bool
    ) -> tuple[list[Event], dict[str, str]]:
        events: list[Event] = []
        sick: dict[str, str] = {}
        unwell: dict[str, str] = {}
        first: list[tuple[str, float, float]] = []

        well = self._well(damage)

        def tell(key: str, value: float, threshold: float) -> None:
            target, operand, name, _ = key.split("/")
            what = f"{name} of {operand}"
            borne = name in BORNE and (target, operand) in well and not self._signals[key].sick(value)
            if not borne:
                sick.setdefault(target, f"{what} {value:.3g}, above {threshold:.3g}")
            if value > self._told.get(key, 0.0) * self._signals[key].rule.ratio:
                self._told[key] = value
                event = Event(batch=batch, unit=target, signal=what, action="alarm", value=value, threshold=threshold)  # fmt: skip
                events.append(
                    dataclasses.replace(event, why=f"{event.detail}; {well[target, operand]}")
                    if borne
                    else event
                )

        lasts = False
        for (target, operand, name), value in damage.items():
            if not math.isfinite(value):  # the loss and the signs tell of it, and no precision mends it
                continue
            key, signal = self._of_operand(target, operand, name, self.recipe(target))
            threshold, is_sick = signal.threshold, signal.sick(value)
            met = is_sick and not signal.rule.counted and key not in self._told and self._meet(batch, key)
            borne = name in BORNE and (target, operand) in well and not is_sick
            if self.rungs[target] and not signal.healthy(value) and not borne:
                unwell.setdefault(target, f"{name} of {operand} is {value:.3g} on {self.recipe(target)} too")
            if self.young and key not in self._told:
                if due and not signal.rule.counted:
                    signal.observe(value)
                    if self._lasted(key, is_sick):
                        tell(key, value, threshold)
                continue
            if ((due or signal.test.fast > 0.5 or is_sick) and signal.observe(value)) or met:
                tell(key, value, threshold)
                lasts |= is_sick and not signal.rule.counted
            elif is_sick:
                first.append((key, value, threshold))
            elif key in self._told and signal.healthy(value):
                del self._told[key]
        if lasts:  # it is no single bad batch, as the others have shown
            for key, value, threshold in first:
                tell(key, value, threshold)
        self._unwell = {
            target: self._unwell.get(target, 0) + 1 for target in unwell if self._can_fall(target)
        }
        for target, looks in self._unwell.items():
            if looks >= TRIAL:
                sick.setdefault(target, unwell[target])
        return events, sick

    def _lasted(self, key: str, is_sick: bool) -> bool:
        """Whether what is looked at in its turn has been sick for :data:`TRIAL` turns."""
        self._lasting[key] = self._lasting.get(key, 0) + 1 if is_sick else 0
        return self._lasting[key] >= TRIAL

    def _well(self, damage: Mapping[tuple[str, str, str], float]) -> dict[tuple[str, str], str]:
        """What may be damaged without being demoted, and why: what is put out while all cost little of the loss (of attentions, while
        operands are well, too), and operands whose products were measured and are all healthy, or borne.
        """
        found: dict[tuple[str, str], str] = {}
        products: dict[tuple[str, str], bool] = {}
        unwell = {
            (target, operand)
            for (target, operand, name), value in damage.items()
            if name in LOST
            and not self._of_operand(target, operand, name, self.recipe(target))[1].healthy(value)
        }
        for (target, which, name), value in damage.items():
            if name in PRODUCTS and math.isfinite(value):
                _, signal = self._of_operand(target, which, name, self.recipe(target))
                costed = (target, OUTPUTS.get(which, ""), "loss_cost") in damage
                # What an attention multiplies goes into its backward, too, whose products nobody looks at.
                seen = which == "y" or not any((target, operand) in unwell for operand in "qkv")
                cheap = self._cost.cheap and costed and seen and not signal.sick(value)
                if cheap:
                    found[target, which] = "it costs little of the loss"
                products[target, which] = cheap or signal.healthy(value)
        for target in {target for target, _ in products}:
            for operand, fed in FEEDS.items():
                of = [products[target, which] for which in fed if (target, which) in products]
                if of and all(of):
                    found[target, operand] = "its products are well"
        return found

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

    def _judge_trials(self, loss: float, sick: dict[str, str]) -> None:
        """A finer rung does not help if the loss stays up on it."""
        for target, left in list(self._trial.items()):
            if self._loss.high > 1:
                limit = self._loss.limit
                sick.setdefault(target, f"the loss is {loss:.4g} on {self.recipe(target)}, above {limit:.4g}")
            self._trial[target] = left - 1
            if left <= 1:
                del self._trial[target]

    def _tell_once(self, key: str, broken: bool) -> None:
        if broken:
            self._told[key] = math.inf
        else:
            self._told.pop(key, None)

    def _of_operand(self, target: str, operand: str, name: str, recipe: str) -> tuple[str, Signal]:
        """An operand's signal under a recipe, run or as a shadow; what is configured bounds the level that a finer one may have."""
        configured = f"{target}/{operand}/{name}/{self._targets[target].recipes[0]}"
        key = f"{target}/{operand}/{name}/{recipe}"
        return key, self._signal(key, name, like=self._signals.get(configured))

    def _signal(self, key: str, name: str, like: Signal | None = None) -> Signal:
        if key not in self._signals:
            self._signals[key] = Signal(RULES[name], like)
        return self._signals[key]

    # -- what to do --------------------------------------------------------------------------------------------------

    def _answer_the_loss(self, batch: int, sick: set[str], rise: Rise) -> list[Event | None]:
        """After an alarm of the loss: what shows part of an alarm or has left its recipe before; if it goes on, the blocks with a
        sign, or all.
        """
        broken = self._loss.broken
        moves: list[Event | None] = []
        for key in self._watched():
            target, operand, name, _ = key.split("/")
            if self._signals[key].suspect and target not in sick:
                sick.add(target)
                moves.append(self._demote(batch, target, f"the loss rose, and {name} of {operand} did"))
        for target, rung in self.rungs.items():
            if rung and not broken and target not in sick and self._can_fall(target):
                sick.add(target)
                moves.append(self._demote(batch, target, f"the loss rose on {self.recipe(target)}"))
        if broken > 1 or rise.climbs:
            why = "the loss is not finite" if broken else "the loss climbs on"
            units = {unit for unit, seen in self._signed.items() if self._count - seen <= HORIZON}
            signed = [t for t, rungs in self._targets.items() if rungs.unit in units and self._can_fall(t)]
            for target in signed or self._targets:
                if target not in sick:
                    self._relapses[target] = max(self._relapses.get(target, 0), BLIND)
                    moves.append(self._demote(batch, target, why))
        return moves

    def _judged_as(self, target: str, name: str) -> str:
        """The recipe whose signals a shadow is held to: the rung above's, or where finer ones cannot be tried the configured one's."""
        return self._targets[target].recipes[0 if RULES[name].counted else self.rungs[target] - 1]

    def _can_fall(self, target: str) -> bool:
        return self.rungs[target] + 1 < len(self._targets[target].recipes)

    def _demote(self, batch: int, target: str, why: str) -> Event | None:
        self._healthy_for[target] = 0
        if not self._can_fall(target):
            return None
        if target in self._promoted:
            self._promoted.discard(target)
            self._relapses[target] = self._relapses.get(target, 0) + 1
        counted = [k for k in self._told if k.startswith(f"{target}/") and RULES[k.split("/")[2]].counted]
        last = len(self._targets[target].recipes) - 1
        return self._move(batch, target, last - self.rungs[target] if counted else 1, why)

    def _promote(self, batch: int, shadow: Mapping[tuple[str, str, str], float]) -> list[Event | None]:
        healthy: dict[str, set[str]] = {}
        for (target, operand, name), value in shadow.items():
            if self.rungs[target]:
                key, signal = self._of_operand(target, operand, name, self._judged_as(target, name))
                if signal.healthy(value):
                    healthy.setdefault(target, set()).add(key)
        moves: list[Event | None] = []
        for target, rung in self.rungs.items():
            if not rung:
                continue
            # All that was measured when it ran there has to be measured again.
            places = [key.split("/") for key in self._signals if key.startswith(f"{target}/")]
            known = {"/".join(key) for key in places if key[3] == self._judged_as(target, key[2])}
            well = bool(known) and known <= healthy.get(target, set()) and not self._loss.high
            self._healthy_for[target] = self._healthy_for.get(target, 0) + 1 if well else 0
            patience = self._quiet * 2 ** self._relapses.get(target, 0)
            if self._healthy_for[target] >= patience and self._loss.quiet_for(patience):
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
            "loss": self._loss.state_dict(),
            "cost": self._cost.state_dict(),
            "count": self._count,
            "unwell": dict(self._unwell),
            "trial": dict(self._trial),
            "looks": self._looks,
            "met": dict(self._met),
            "lasting": dict(self._lasting),
            "look_again": self.look_again,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Take back what :meth:`state_dict` gave, of the same targets.

        Returns:
            A sentence for each target that runs something else than it did, because what it ran is none of its rungs now: it goes
            on one rung below what is configured. And the names that one of both lacks, which start anew.
        """
        state, differs = taken(saved, self.state_dict())
        said = []
        for target, (rung, recipe) in state["rungs"].items():
            names = list(self._targets[target].recipes)
            self.rungs[target] = 0 if not rung else names.index(recipe, 1) if recipe in names[1:] else 1
            self.rungs[target] = min(self.rungs[target], len(names) - 1)
            if rung and self.recipe(target) != recipe:
                said.append(f"{target} ran {recipe}, now {self.recipe(target)}")
        lacks: set[str] = set()
        for key, of_signal in state["signals"].items():
            unit, *rest = key.split("/")
            name = rest[1 if unit in self._targets else 0]
            if name in RULES and unit != MODEL:
                lacks.update(self._signal(key, name).load_state_dict(of_signal))
            else:
                lacks.add(name)
        differs += [f"signals/{name}" for name in sorted(lacks)]
        self._told, self._healthy_for = dict(state["told"]), dict(state["healthy_for"])
        self._relapses, self._promoted = dict(state["relapses"]), set(state["promoted"])
        self._signed, self._count = dict(state["signed"]), state["count"]
        differs += [f"loss/{name}" for name in self._loss.load_state_dict(state["loss"])]
        differs += [f"cost/{name}" for name in self._cost.load_state_dict(state["cost"])]
        self._unwell, self._trial = dict(state["unwell"]), dict(state["trial"])
        self._looks, self.look_again = state["looks"], state["look_again"]
        self._met, self._lasting = dict(state["met"]), dict(state["lasting"])
        return said, differs
