"""The Composer callback ``divergence_guard``."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import torch
from composer.core import Event, State
from composer.loggers import Logger
from composer.utils import checkpoint, dist

from foundry_fp8.callbacks.base import Monitor, model_of
from foundry_fp8.callbacks.carried_state import CarriedState
from foundry_fp8.callbacks.divergence_guard.agreement import everyone_works, gather, worst
from foundry_fp8.callbacks.divergence_guard.config import KEY, DivergenceGuardConfig
from foundry_fp8.callbacks.divergence_guard.histories import mismatches
from foundry_fp8.callbacks.divergence_guard.resuming import collected, take_back
from foundry_fp8.callbacks.divergence_guard.way_back import way_back
from foundry_fp8.compat.compiled_model import is_compiled
from foundry_fp8.compat.composer_device import device_of
from foundry_fp8.layers.attention import SLOTS
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.observe.divergence.amax_review import AmaxReview
from foundry_fp8.observe.divergence.decision import Decision
from foundry_fp8.observe.divergence.ladder import Ladder, ladders_of
from foundry_fp8.observe.divergence.observed import MODEL, Observed, Rungs
from foundry_fp8.observe.divergence.observed import Event as GuardEvent
from foundry_fp8.observe.divergence.signals import RULES
from foundry_fp8.observe.divergence.watch import Watch, together
from foundry_fp8.surgery.attention import FP8AttentionState

__all__ = ["DivergenceGuard"]

log = logging.getLogger(__name__)

TOLD = ("batch", "unit", "action", "signal", "detail")
"""The columns of the table ``guard_events``."""
MOVES = ("demote", "promote")


class DivergenceGuardState(CarriedState):
    """Rungs, statistics and events of a :class:`DivergenceGuard` in the checkpoint."""


class DivergenceGuard(Monitor):
    """Watches layers, raises an alarm, acts on the layers at fault.

    Ranks agree by one collective of a few floats a layer in each batch: every rank sees the worst of all, and so decides
    the same. A rank on which the guard fails says so in it, and all switch it off together.

    Args:
        **options: The fields of :class:`DivergenceGuardConfig`.

    Attributes:
        events: Every alarm and action so far: ``batch``, ``unit`` (a layer, a block, or ``model``), ``signal``, ``value``,
            ``threshold``, ``action``, ``why``, ``detail`` (the last four in words).
        ladders: What each converted layer can run, by name.
        decision: What is made of it; ``None`` before training starts.
    """

    key = "divergence_guard"

    def __init__(self, **options: Any) -> None:
        super().__init__(DivergenceGuardConfig, options)
        self.events: list[dict[str, Any]] = []
        self.ladders: dict[str, Ladder] = {}
        self.decision: Decision | None = None
        self._watch: Watch | None = None
        self._reviews: dict[str, AmaxReview] = {}
        """Of the amax histories, by the name of the state that holds them."""
        self._loaded: dict[str, Any] | None = None
        self._losses: list[float] = []
        """Of the batches since the last observation in turn."""
        self._backwards = 0
        """In this batch."""
        self._compiled = False
        self._save_due = False
        self._agreed_off = False
        self._gathered = -1
        """Batch of the last gather."""

    # -- life with other ranks ---------------------------------------------------------------------------------------

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """As any monitor; a failed one goes on meeting the others until all know."""
        # Before this batch decides about the next.
        due = event == Event.BATCH_END and self._due(state, done=True)
        meets = due or (event == Event.BATCH_END and self._pulse(state) is not None)
        super().run_event(event, state, logger)
        # Failed since, here alone: the others save with this rank.
        if event == Event.BATCH_CHECKPOINT and self._save_due:
            self.batch_checkpoint(state, logger)
        if self._agreed_off or dist.get_world_size() == 1:
            return
        if event == Event.FIT_START:
            if not everyone_works(state, self.failed is None):
                self._switch_off("another rank could not start it")
        elif meets and self.failed is not None:
            met = self._gathered == state.timestamp.batch.value  # it failed after this batch's gather
            if not met:
                self._gather(state, None, whole=due)

    def _switch_off(self, why: str) -> None:
        self._agreed_off = True
        if self.failed is None:
            self.disable(RuntimeError(why))

    def _gather(self, state: State, mine: list[float] | None, *, whole: bool) -> list[list[float]] | None:
        """Every rank's numbers in a due batch (``whole``), the worst of them in others."""
        self._gathered = state.timestamp.batch.value
        meet = gather if whole else worst
        rows = meet(state, mine, 0 if self._watch is None else self._watch.columns.count)
        if rows is None:
            self._switch_off("it failed on another rank")
        return rows

    def _due(self, state: State, *, done: bool = False) -> bool:
        again = self.decision is not None and self.decision.look_again
        return again or self._in_turn(state.timestamp.batch.value + (not done))

    def _pulse(self, state: State) -> str | None:
        """The one linear that is looked at in a batch that is not due; none in a graph, which would be compiled again for each of
        them, and run eagerly from the eighth on.
        """
        if self._watch is None or self._compiled:
            return None
        batch = state.timestamp.batch.value
        return self._watch.pulse(batch - batch // self.config.interval)

    def _in_turn(self, batch: int) -> bool:
        return batch % self.config.interval == 0

    # -- events ------------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Take the hooks away."""
        if self._watch is not None:
            self._watch.close()
        for review in self._reviews.values():
            review.detach()

    def init(self, state: State, logger: Logger) -> None:
        """Have the state carried."""
        state.algorithms.append(DivergenceGuardState(self))

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the layers, and put them where a checkpoint left them."""
        if self.decision is None:  # a second fit() goes on where the first one stopped
            self.ladders = ladders_of(model_of(state), self.config.finer, device_of(state))
            self.decision = Decision(
                {name: Rungs(unit=one.unit, recipes=one.recipes) for name, one in self.ladders.items()},
                quiet=math.ceil(self.config.quiet_batches / self.config.interval),
                acts="demote" in self.config.actions,
            )
        for kind in (FP8State, FP8AttentionState):
            found = kind.of(state.model)
            if found is not None and found.delayed is not None:
                review = self._reviews.get(kind.NAME) or AmaxReview(
                    found.delayed, acts="demote" in self.config.actions
                )
                self._reviews[kind.NAME] = review
                review.attach()
        self._watch = Watch(model_of(state), self.ladders, self.guarded, self._reviews.values())
        self._compiled = is_compiled(state.model)
        if self._loaded is not None:
            self.events, self._losses = take_back(
                self._loaded, self.decision, self._watch, self._reviews, self.ladders, self.config.finer
            )
            self._loaded = None
        self._watch.follow()
        if "demote" in self.config.actions and not self.ladders:
            log.info(
                "%s: the model has nothing in FP8; there is nothing to demote, alarms are logged only.", KEY
            )

    def batch_start(self, state: State, logger: Logger) -> None:
        """Attach to all that is measured if this batch is due, else to one linear."""
        self._backwards = 0
        if self._watch is None:
            return
        if self._due(state):
            self._watch.attach()
        elif (only := self._pulse(state)) is not None:
            self._watch.attach(only)

    def after_backward(self, state: State, logger: Logger) -> None:
        """Gradients before any clipping; of several microbatches, the last one's are the sum."""
        self._backwards += 1
        if self._due(state) and self._watch is not None:
            self._watch.read_gradients()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Observe, agree, act."""
        if self._watch is None or self.decision is None:
            return
        self._losses.append(_loss(state))
        found = mismatches(self._reviews.values(), self.ladders, state.timestamp.batch.value)
        seen = None
        if self._due(state, done=True):
            seen, decided = self._observe(state, {event.unit for event in found if event.action == "alarm"})
            found += decided
        elif self._pulse(state) is not None:
            self._watch.detach()
            seen_here = self._watch.collect(self._losses[-1], self._gradient_scale(state))
            rows = self._gather(state, seen_here, whole=False)
            damage = {} if rows is None else together(rows, self._watch.columns).damage
            self.decision.pulse(state.timestamp.batch.value, damage)
        # Before any logger, which may fail on one rank alone: the ranks would run different recipes, and meet at different times.
        self._move(state, {event.unit for event in found if event.action in MOVES})
        if any(event.action == "alarm" for event in found):
            found += self._further_actions(state.timestamp.batch.value, state)
        if seen is not None:
            self._log(seen, logger)
        self._tell(state, logger, found)

    def _observe(self, state: State, mended: set[str]) -> tuple[Observed | None, list[GuardEvent]]:
        """What all ranks see and what is decided on it; what a layer in ``mended`` shows of this one batch is left out."""
        assert self._watch is not None and self.decision is not None
        self._watch.detach()
        in_turn = self._in_turn(state.timestamp.batch.value)
        # Of one batch it is noisy, and those between are known too. A look out of turn is about this batch.
        losses = self._losses if in_turn else self._losses[-1:]
        seen_here = self._watch.collect(math.fsum(losses) / len(losses), self._gradient_scale(state))
        rows = self._gather(state, seen_here, whole=True)
        if rows is None:
            return None, []
        if in_turn:
            self._losses = []
        seen = together(rows, self._watch.columns)
        self._watch.amax.update(seen.amax)
        batch = state.timestamp.batch.value
        if "demote" in self.config.actions:
            damage = {
                where: value
                for where, value in seen.damage.items()
                if where[0] not in mended or RULES[where[2]].counted
            }
            seen = dataclasses.replace(seen, damage=damage)
        decided = self.decision.decide(batch, seen, due=in_turn)
        if self.decision.young:
            for review in self._reviews.values():
                review.forget()
        return seen, decided

    def _gradient_scale(self, state: State) -> float:
        """What the trainer multiplied a microbatch's gradients with: its share of the batch, and what float16 needs."""
        scale = state.scaler.get_scale() if state.scaler is not None and state.scaler.is_enabled() else 1.0
        return float(scale) / max(1, self._backwards)

    def _tell(self, state: State, logger: Logger, found: list[GuardEvent]) -> None:
        for event in found:
            self.events.append({**dataclasses.asdict(event), "detail": event.detail})
            log.warning("%s: %s.", KEY, event)
            if event.action in MOVES and self.decision is not None:
                rung = float(self.decision.rungs[event.unit])
                self.log(logger, {}, {f"guard/rung/{event.unit}": rung})
        if found:
            # All of them each time: a reader of the log takes the last table of a name.
            told = [[str(event[column]) for column in TOLD] for event in self.events]
            logger.log_table(list(TOLD), told, "guard_events", state.timestamp.batch.value)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save where the trainer saves, so that the checkpoint is one that resumes."""
        if not self._save_due:
            return
        self._save_due = False
        name = f"{self.config.checkpoint_folder}/{state.run_name}/ba{state.timestamp.batch.value}-rank{{rank}}.pt"
        saved = checkpoint.save_checkpoint(state, name)
        log.warning("%s: saved %s", KEY, saved or name)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Leave no hook behind."""
        self.detach()

    # -- actions -----------------------------------------------------------------------------------------------------

    def _further_actions(self, batch: int, state: State) -> list[GuardEvent]:
        found = []
        if "checkpoint" in self.config.actions:
            self._save_due = True
            found.append(GuardEvent(batch=batch, unit=MODEL, signal="", action="checkpoint"))
        if "stop" in self.config.actions:
            why = way_back(state)
            found.append(GuardEvent(batch=batch, unit=MODEL, signal="the run", action="stop", why=why))
            state.stop_training()
        return found

    def _move(self, state: State, moved: set[str]) -> None:
        """Have the layers run what was decided."""
        assert self.decision is not None and self._watch is not None
        renewed = False
        for name in self.ladders:  # in the same order on every rank
            if name not in moved:
                continue
            ladder, rung = self.ladders[name], self.decision.rungs[name]
            before = ladder.rung
            ladder.move(rung)
            if isinstance(ladder.module, FP8Linear):  # its amaxes go on being recorded
                if before == 0:
                    ladder.forget_history({})
            elif rung == 0 and ladder.module.slots:
                amax: dict[str, float] = {}
                for operand in ladder.operands:
                    seen = self._watch.amax.get((name, operand), 0.0)
                    amax[SLOTS[operand]] = max(seen, amax.get(SLOTS[operand], 0.0))
                ladder.forget_history(amax)
                renewed = True
        self._watch.follow()
        if renewed:  # a collective; every rank has decided the same
            found = FP8AttentionState.of(state.model)
            if found is not None and found.delayed is not None:
                found.delayed.update()

    def _log(self, seen: Observed, logger: Logger) -> None:
        assert self.decision is not None
        worst: dict[str, float] = {"loss": seen.loss}
        for (*_, name), value in [*seen.signs.items(), *seen.damage.items()]:
            worst[name] = max(value, worst.get(name, 0.0))
        metrics = {
            "guard/demoted_layers": float(sum(rung > 0 for rung in self.decision.rungs.values())),
            "guard/alarms": float(sum(event["action"] == "alarm" for event in self.events)),
        }
        if any(name == "loss_cost" for *_, name in (*seen.damage, *seen.shadow)):
            metrics["guard/loss_cost"] = seen.loss_cost
        details = {f"guard/{name}/worst" if name != "loss" else "guard/loss": v for name, v in worst.items()}
        self.log(logger, metrics, details)

    # -- resuming ----------------------------------------------------------------------------------------------------

    def carried_state(self) -> dict[str, Any]:
        """Rungs, running statistics and events: numbers and strings only."""
        if self._loaded is not None:  # saved again before the model was ready
            return self._loaded
        return collected(self.decision, self._watch, self._reviews, self.events, self._losses)

    def take_carried_state(self, state: dict[str, Any]) -> None:
        """Keep the state until the model is ready."""
        self._loaded = state


def _loss(state: State) -> float:
    """The batch's loss: what the trainer logged (the mean over ranks)."""
    losses = getattr(state, "total_loss_dict", None)
    if losses:
        return float(losses.get("loss/train/total", math.nan))
    loss = state.loss
    return float(loss if isinstance(loss, torch.Tensor) else sum(loss.values()))  # type: ignore[union-attr]
