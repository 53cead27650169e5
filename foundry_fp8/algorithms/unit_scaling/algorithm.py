"""The Composer algorithm ``unit_scaling``."""

from __future__ import annotations

import logging
from typing import Any

from composer.core import Event, State
from composer.loggers import Logger

from foundry_fp8.algorithms.method import Method
from foundry_fp8.models.mus.optimizer import check_groups, check_schedulers, scale_groups
from foundry_fp8.models.mus.structure import UnitScaledModel, initialise_mpt_head, unit_scaled
from foundry_fp8.models.unit_scaling import KEY, UnitScalingConfig

__all__ = ["UnitScaling"]

log = logging.getLogger(__name__)

PLACES = {  # where a user sets each value, for messages
    "tau": "model.tau",
    "base_width": f"{KEY}.base_width",
    "final_norm": "model.final_norm (MPT: model.norm_type, no_norm for none)",
}


class UnitScaling(Method):
    """Sets the learning rate of a µnit-scaled model's hidden weights: ``lr * sqrt(base_width / width)`` (arXiv 2502.05967, table 1).

    Runs on ``Event.INIT``, before schedulers are made (they keep the ratio) and the model is wrapped, and checks on
    ``Event.FIT_START`` that the parameter groups are still scaled. A model that is µnit-scaled only in part is refused.

    Args:
        **options: The fields of :class:`UnitScalingConfig`.
    """

    config_class = UnitScalingConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._rates: list[float] = []
        self._described: UnitScaledModel | None = None

    def match(self, event: Event, state: State) -> bool:
        """Run on INIT and FIT_START."""
        return event in (Event.INIT, Event.FIT_START)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Scale the parameter groups (INIT), or check that they are still scaled (FIT_START)."""
        if event == Event.FIT_START:
            assert self._described is not None
            for optimizer in state.optimizers:
                check_groups(optimizer, state.model, self._described)
                check_schedulers(state.schedulers, self._rates)
            return
        self._described = unit_scaled(state.model)
        initialise_mpt_head(state.model)
        for optimizer in state.optimizers:
            factor = scale_groups(optimizer, state.model, self._described, self.config.base_width)
            self._rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
            log.info(
                "%s: %d hidden weights train at lr x sqrt(%d / %d) = lr x %.4g",
                KEY,
                len(self._described.hidden),
                self.config.base_width,
                self._described.width,
                factor,
            )
            logger.log_hyperparameters({"unit_scaling": {**self._facts(), "hidden_lr_factor": factor}})

    def _facts(self) -> dict[str, Any]:
        assert self._described is not None
        return {
            "base_width": self.config.base_width,
            "width": self._described.width,
            "tau": list(self._described.taus),
            "final_norm": self._described.final_norm,
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to agree with: base width, width, tau, the final norm."""
        found = super().state_dict()  # the repr, which Composer saves of every algorithm
        return found if self._described is None else found | self._facts()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the checkpoint with this run.

        Raises:
            RuntimeError: The checkpoint was trained with another base width, width or tau, or without the final norm.
        """
        if "width" in state:
            state = {"final_norm": False, **state}  # older checkpoints lack the key
        for name, value in self._facts().items():
            if name in state and state[name] != value:
                where = PLACES.get(name, "the model")
                raise RuntimeError(
                    f"{KEY}: the checkpoint was trained with {name} {state[name]}, this run has {value}. "
                    f"Set {where} as it was: the weights were trained for it."
                )
