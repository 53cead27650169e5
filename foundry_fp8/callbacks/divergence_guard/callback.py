"""The Composer callback ``divergence_guard``."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from composer.core import Event, State
from composer.loggers import Logger
from composer.utils import checkpoint, dist

from foundry_fp8.callbacks.base import Monitor, device_of, model_of
from foundry_fp8.callbacks.carried_state import CarriedState
from foundry_fp8.callbacks.run_log import RunPath
from foundry_fp8.config import Config, ConfigError, Positive, at_least, not_empty, one_of
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import FOR_ANY_MODEL
from foundry_fp8.observe.divergence.ladder import Ladder, ladders_of
from foundry_fp8.observe.divergence.signals import RULES, Signal
from foundry_fp8.observe.divergence.watch import LAYER_SIGNALS, Watch

__all__ = ["DivergenceGuard", "DivergenceGuardConfig"]

log = logging.getLogger(__name__)

KEY = "callbacks.divergence_guard"

FINER = tuple(name for name in FOR_ANY_MODEL if name != "delayed")
GLOBAL = "model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergenceGuardConfig(Config):
    """The YAML under ``callbacks.divergence_guard``."""

    key = KEY

    interval: Positive = 10
    """Batches between two observations. The batches between cost nothing."""
    actions: Annotated[Sequence[Literal["warn", "checkpoint", "demote", "stop"]], not_empty] = ("demote",)
    """What an alarm does besides being logged: ``warn`` (nothing more), ``checkpoint``, ``demote``, ``stop``; several."""
    signals: Annotated[Sequence[Annotated[str, one_of(*RULES)]], not_empty] = tuple(RULES)
    """What to watch: ``kurtosis``, ``saturated``, ``flushed``, ``gradient_norm`` (each layer by layer), ``loss``."""
    finer: Annotated[str, one_of("auto", *FINER)] | None = "auto"
    """The rung between the configured recipe and high precision: a recipe's name, ``auto`` (current after delayed, block
    after current), or null to go straight to high precision."""
    quiet_batches: Positive = 500
    """Batches without anything above its threshold before a demoted layer is promoted by one rung. Doubles for a layer
    each time it has to be demoted again."""
    window: Annotated[int, at_least(4)] = 64
    """Observations that the running statistics hold."""
    warmup: Annotated[int, at_least(2)] = 10
    """Observations before the first alarm (a loss that is not finite does not wait)."""
    patience: Positive = 2
    """Observations above the threshold, in a row, that make an alarm."""
    checkpoint_folder: RunPath = "divergence_guard"
    """Where ``checkpoint`` saves: ``ba<batch>-rank<rank>.pt``, under this folder and the run's name."""
    details: bool = False
    """Send to every logger what only the run log holds otherwise: the worst of each signal, and each unit's rung."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup > self.window:
            raise ConfigError(
                f"{KEY}.warmup: {self.warmup} observations never come together in a window of {self.window}, so nothing "
                f"would raise an alarm. Set it to at most {KEY}.window."
            )


class DivergenceGuardState(CarriedState):
    """Rungs, statistics and events of a :class:`DivergenceGuard` in the checkpoint."""


class DivergenceGuard(Monitor):
    """Watches layers, raises an alarm, acts on the layers at fault.

    Ranks agree by one gather of a few floats a layer in each due batch: every rank sees the worst of all, and so decides
    the same. A rank on which the guard fails says so in that gather, and all switch it off together.

    Args:
        **options: The fields of :class:`DivergenceGuardConfig`.

    Attributes:
        events: Every alarm and action so far: ``batch``, ``unit``, ``signal``, ``value``, ``threshold``, ``action``.
    """

    key = "divergence_guard"

    def __init__(self, **options: Any) -> None:
        super().__init__(DivergenceGuardConfig, options)
        self.events: list[dict[str, Any]] = []
        self.ladders: dict[str, Ladder] = {}
        self._watch: Watch | None = None
        self._signals: dict[tuple[str, str], Signal] = {}
        self._quiet_since: dict[str, int] = {}
        self._relapses: Counter[str] = Counter()
        """How often a unit was demoted again after it had been promoted to what was configured."""
        self._loaded: dict[str, Any] | None = None
        self._save_due = False
        self._agreed_off = False
        self._gathered = -1
        """Batch of the last gather."""

    # -- life with other ranks ---------------------------------------------------------------------------------------

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """As any monitor; a failed one goes on meeting the others until all know."""
        super().run_event(event, state, logger)
        if self._agreed_off or dist.get_world_size() == 1:
            return
        if event == Event.FIT_START:
            self._agree_to_start(state)
        elif event == Event.BATCH_END and self.failed is not None and self._due(state, done=True):
            met = self._gathered == state.timestamp.batch.value  # it failed after this batch's gather
            if not met:
                self._gather(state, None)

    def _agree_to_start(self, state: State) -> None:
        working = state.device.tensor_to_device(torch.tensor([float(self.failed is None)]))
        dist.all_reduce(working, reduce_operation="MIN")
        if not working.item():
            self._switch_off("another rank could not start it")

    def _switch_off(self, why: str) -> None:
        self._agreed_off = True
        if self.failed is None:
            self.disable(RuntimeError(why))

    def _gather(self, state: State, mine: list[float] | None) -> list[list[float]] | None:
        """Every rank's numbers, or ``None`` if the guard has failed somewhere; ``mine`` is ``None`` if it has here."""
        self._gathered = state.timestamp.batch.value
        size = 2 + len(LAYER_SIGNALS) * len(self.ladders)
        row = [0.0] * size if mine is None else [1.0, *mine]
        if dist.get_world_size() == 1:
            return [row[1:]]
        rows = dist.all_gather(state.device.tensor_to_device(torch.tensor(row, dtype=torch.float64)))
        values = torch.stack(list(rows)).tolist()
        if not all(row[0] for row in values):
            self._switch_off("it failed on another rank")
            return None
        return [row[1:] for row in values]

    def _due(self, state: State, *, done: bool = False) -> bool:
        return (state.timestamp.batch.value + (not done)) % self.config.interval == 0

    # -- events ------------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Take the hooks away."""
        if self._watch is not None:
            self._watch.detach()

    def init(self, state: State, logger: Logger) -> None:
        """Have the state carried."""
        state.algorithms.append(DivergenceGuardState(self))

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the layers, and put them where a checkpoint left them."""
        if not self.ladders:  # a second fit() goes on where the first one stopped
            found = ladders_of(model_of(state), self.config.finer, device_of(state))
            self.ladders = {ladder.name: ladder for ladder in found}
        self._watch = Watch(model_of(state), self.guarded)
        options = {
            "window": self.config.window,
            "warmup": self.config.warmup,
            "patience": self.config.patience,
        }
        for name in self.config.signals:
            for unit in [GLOBAL] if name == "loss" else self.ladders:
                self._signals.setdefault((unit, name), Signal(RULES[name], **options))
        if self._loaded is not None:
            self._take_back(self._loaded)
            self._loaded = None
        if "demote" in self.config.actions and not any(ladder.modules for ladder in self.ladders.values()):
            log.info(
                "%s: the model has no FP8 linear; there is nothing to demote, alarms are logged only.", KEY
            )

    def batch_start(self, state: State, logger: Logger) -> None:
        """Attach if this batch is due."""
        if self._due(state) and self._watch is not None:
            self._watch.attach()

    def after_backward(self, state: State, logger: Logger) -> None:
        """Gradients before any clipping; of several microbatches, the last one's are the sum."""
        if self._due(state) and self._watch is not None:
            self._watch.read_gradients()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Observe, agree, act."""
        if not self._due(state, done=True) or self._watch is None:
            return
        self._watch.detach()
        units = self._watch.collect()
        mine = [_loss(state), *(value for values in units.values() for value in values)]
        rows = self._gather(state, mine)
        if rows is None:
            return
        observed = _combine(rows, list(units))
        batch = state.timestamp.batch.value
        self._log_observations(observed, logger)
        alarms = {
            where: value
            for where, value in observed.items()
            if where in self._signals and self._observe(where, value, batch)
        }
        if alarms:
            self._act({unit for unit, _ in alarms}, batch, state, logger)
        self._promote(batch, state, logger)

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

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _observe(self, where: tuple[str, str], value: float, batch: int) -> bool:
        unit, name = where
        signal = self._signals[where]
        threshold = signal.threshold
        alarm = signal.observe(value)
        if not signal.calm:
            for quiet in self.ladders if unit == GLOBAL else [unit]:
                self._quiet_since[quiet] = batch
        if alarm:
            self._note(batch, unit, name, value, threshold, "alarm")
            log.warning(
                "%s: batch %d, %s: %s is %.4g, above %.4g.", KEY, batch, unit, name, value, threshold,
            )  # fmt: skip
        return alarm

    def _act(self, units: set[str], batch: int, state: State, logger: Logger) -> None:
        logger.log_metrics({"guard/alarms": float(sum(event["action"] == "alarm" for event in self.events))})
        if "checkpoint" in self.config.actions:
            self._save_due = True
            self._note(batch, GLOBAL, "", math.nan, math.nan, "checkpoint")
        if "demote" in self.config.actions:
            for unit in self._at_fault(units):
                if self.ladders[unit].rung == 0 and any(
                    e["unit"] == unit and e["action"] == "promote" for e in self.events
                ):
                    self._relapses[unit] += 1
                self._move(unit, +1, batch, logger)
        if "stop" in self.config.actions:
            self._note(batch, GLOBAL, "", math.nan, math.nan, "stop")
            log.warning("%s: stopping the run at batch %d.", KEY, batch)
            state.stop_training()

    def _at_fault(self, units: set[str]) -> list[str]:
        """The units with an alarm of their own; if only the loss has one, those with anything above, or else all."""
        own = [unit for unit in self.ladders if unit in units]
        if own:
            return own
        suspects = [
            u for u in self.ladders if any(not s.calm for (unit, _), s in self._signals.items() if unit == u)
        ]
        return suspects or list(self.ladders)

    def _promote(self, batch: int, state: State, logger: Logger) -> None:
        assert self._watch is not None
        renewed = False
        for unit, ladder in self.ladders.items():
            patience = self.config.quiet_batches * 2 ** self._relapses[unit]
            if ladder.rung and batch - self._quiet_since.get(unit, batch) >= patience:
                self._move(unit, -1, batch, logger)
                renewed |= ladder.forget_history(self._watch.amax)
        fp8 = FP8State.of(state.model)
        if renewed and fp8 is not None and fp8.delayed is not None:
            fp8.delayed.update()  # a collective; every rank has decided the same

    def _move(self, unit: str, step: int, batch: int, logger: Logger) -> None:
        ladder = self.ladders[unit]
        before = ladder.recipe
        if not ladder.move(ladder.rung + step):
            return
        self._quiet_since[unit] = batch
        action = "demote" if step > 0 else "promote"
        self._note(batch, unit, f"{before} -> {ladder.recipe}", math.nan, math.nan, action)
        log.warning("%s: batch %d, %s: %sd from %s to %s.", KEY, batch, unit, action, before, ladder.recipe)
        demoted = float(sum(ladder.rung > 0 for ladder in self.ladders.values()))
        self.log(logger, {"guard/demoted_layers": demoted}, {f"guard/rung/{unit}": float(ladder.rung)})

    def _note(self, batch: int, unit: str, signal: str, value: float, threshold: float, action: str) -> None:
        self.events.append(
            {
                "batch": batch,
                "unit": unit,
                "signal": signal,
                "value": value,
                "threshold": threshold,
                "action": action,
            }
        )

    def _log_observations(self, observed: dict[tuple[str, str], float], logger: Logger) -> None:
        details = {}
        for name in self.config.signals:
            values = [value for (_, signal), value in observed.items() if signal == name]
            details[f"guard/{name}/worst" if name != "loss" else "guard/loss"] = max(values)
        metrics = {
            "guard/demoted_layers": float(sum(ladder.rung > 0 for ladder in self.ladders.values())),
            "guard/alarms": float(sum(event["action"] == "alarm" for event in self.events)),
        }
        self.log(logger, metrics, details)

    # -- resuming ----------------------------------------------------------------------------------------------------

    def carried_state(self) -> dict[str, Any]:
        """Rungs, running statistics and events: numbers and strings only."""
        if self._loaded is not None:  # saved again before the model was ready
            return self._loaded
        return {
            "rungs": {unit: [ladder.rung, ladder.recipe] for unit, ladder in self.ladders.items()},
            "signals": {
                f"{unit}/{name}": signal.state_dict() for (unit, name), signal in self._signals.items()
            },
            "quiet_since": dict(self._quiet_since),
            "relapses": dict(self._relapses),
            "events": list(self.events),
        }

    def take_carried_state(self, state: dict[str, Any]) -> None:
        """Keep the state until the model is ready."""
        self._loaded = state

    def _take_back(self, state: dict[str, Any]) -> None:
        if set(state["rungs"]) != set(self.ladders):
            log.warning("%s: the checkpoint is of a model with other layers; the guard starts afresh.", KEY)
            return
        for unit, (rung, recipe) in state["rungs"].items():
            ladder = self.ladders[unit]
            ladder.move(ladder.rung_of(recipe) if rung else 0)
            if rung and ladder.recipe != recipe:
                log.warning(
                    "%s: %s ran %s when the checkpoint was saved, which is none of its rungs now (finer: %s); it goes on "
                    "in %s.", KEY, unit, recipe, self.config.finer, ladder.recipe,
                )  # fmt: skip
        for key, saved in state["signals"].items():
            unit, _, name = key.partition("/")
            if (unit, name) in self._signals:
                self._signals[unit, name].load_state_dict(saved)
        self._quiet_since = dict(state["quiet_since"])
        self._relapses = Counter(state["relapses"])
        self.events = list(state["events"])


def _loss(state: State) -> float:
    """The batch's loss: what the trainer logged (the mean over ranks)."""
    losses = getattr(state, "total_loss_dict", None)
    if losses:
        return float(losses.get("loss/train/total", math.nan))
    loss = state.loss
    return float(loss if isinstance(loss, torch.Tensor) else sum(loss.values()))  # type: ignore[union-attr]


def _combine(rows: list[list[float]], units: list[str]) -> dict[tuple[str, str], float]:
    """What all ranks together observed: the worst of the layer signals, the norm of all gradients, the mean loss."""
    observed = {(GLOBAL, "loss"): sum(row[0] for row in rows) / len(rows)}
    width = len(LAYER_SIGNALS)
    for index, unit in enumerate(units):
        columns = list(zip(*(row[1 + index * width : 1 + (index + 1) * width] for row in rows), strict=True))
        for name, values in zip(LAYER_SIGNALS, columns, strict=True):
            bad = any(math.isnan(value) for value in values)
            together = math.sqrt(sum(values)) if name == "gradient_norm" and not bad else max(values)
            observed[unit, name] = math.inf if bad else together
    return observed
