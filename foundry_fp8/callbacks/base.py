"""What every monitor has: it can fail, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from composer.core import Callback, Event, State, get_precision_context
from composer.loggers import Logger
from composer.utils import ensure_tuple
from torch import Tensor, nn

from foundry_fp8.callbacks.run_log import ensure_run_log, log_details
from foundry_fp8.config import Config, ConfigError, from_mapping
from foundry_fp8.distributed.attendance import RanksLost
from foundry_fp8.model_structure.wrappers import without_ddp
from foundry_fp8.observe.switched_off import SwitchesOff

__all__ = ["Monitor", "model_of", "total_loss", "training_loss"]


def model_of(state: State) -> nn.Module:
    """The model under the names that its user knows: not DDP's wrapper, which puts ``module.`` before all of them."""
    return without_ddp(state.model)


def total_loss(loss: Any) -> Tensor:
    """The scalar of what ``ComposerModel.loss`` gives: a tensor, several, or a mapping with ``total``."""
    parts = [loss["total"]] if isinstance(loss, dict) and "total" in loss else ensure_tuple(loss)
    return sum(part.mean() for part in parts)


def training_loss(state: State) -> Callable[[nn.Module, Any], Tensor]:
    """``loss_of(model, batch)``: what the trainer's backward begins with, under its autocast and scaled as it scales."""
    model: Any = model_of(state)

    def loss_of(module: nn.Module, batch: Any) -> Tensor:
        batch = state.device.batch_to_device(batch)  # as the trainer does with each microbatch
        with get_precision_context(state.precision, state.precision_config):
            loss = model.loss(module(batch), batch)
        scale = state.scaler.get_scale() if state.scaler is not None else 1.0  # 1 where it is off
        return total_loss(loss) * scale

    return loss_of


class Monitor(Callback, SwitchesOff):
    """A callback that disables itself, with one logged error, when something in it raises.

    A subclass names its ``key`` and config, writes the events as any Composer callback, and wraps every function that it
    hangs into the model with :meth:`guarded`. What it *asks* for wrongly (a
    pattern that matches no module, found at ``Event.INIT``) is an error all the same, because nothing has been spent
    yet.
    """

    key: ClassVar[str]
    """The name in the YAML, under ``callbacks``."""
    config_class: ClassVar[type[Config]]

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.config: Any = from_mapping(self.config_class, options, f"callbacks.{self.key}")
        self.name = f"callbacks.{self.key}"
        self.meter: Any = None  # from the start of training on

    def detach(self) -> None:
        """Take the meter's hooks out of the model."""
        if self.meter is not None:
            self.meter.detach()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"

    @property
    def meter_options(self) -> dict[str, Any]:
        """The options of the YAML without ``details``, which is the callback's alone."""
        return {name: value for name, value in self.options.items() if name != "details"}

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Run the event's method, unless the monitor has failed before."""
        if self.failed is not None:
            return
        try:
            if event == Event.INIT:
                ensure_run_log(state, logger)
            super().run_event(event, state, logger)
        except ConfigError as error:
            if event == Event.INIT:
                raise
            self.disable(error)
        except RanksLost:  # this rank's next collective would meet another one of theirs
            raise
        except Exception as error:
            self.disable(error)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Begin to measure if this batch is due."""
        if self.meter is not None:
            self.meter.begin(state.timestamp.batch.value)

    def log(self, logger: Logger, metrics: dict[str, float], details: dict[str, float]) -> None:
        """``metrics`` go to every logger. ``details`` (by layer, by unit) go to the run log alone, or with ``details: true``
        to every logger too.
        """
        logger.log_metrics(metrics | details if self.config.details else metrics)
        if not self.config.details:
            log_details(logger, details)

    def close(self, state: State, logger: Logger) -> None:
        """Leave no hook behind when the trainer closes."""
        self.detach()
