"""The Composer Algorithm."""

from __future__ import annotations

import logging
from typing import Any

from composer.core import Event, State
from composer.loggers import Logger

from foundry_fp8.activations.fused_head.apply import FusedHead as Fused
from foundry_fp8.activations.fused_head.apply import FusedHeadConfig, apply_fused_head
from foundry_fp8.algorithms.method import Method, warns_without_effect
from foundry_fp8.model_structure.wrappers import without_ddp
from foundry_fp8.run.clashes import refuse
from foundry_fp8.run.settings import Run

__all__ = ["FusedHead"]

log = logging.getLogger(__name__)


class FusedHead(Method):
    """Trains without logits: the head gives the losses of its tokens.

    Runs once, on ``Event.FIT_START``, when the model is wrapped. It has no state: a run may switch it on or off at any checkpoint.

    Args:
        **options: The fields of :class:`~foundry_fp8.activations.fused_head.apply.FusedHeadConfig`.

    Attributes:
        fused: What was fused; ``None`` before ``Event.FIT_START``.
    """

    config_class = FusedHeadConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fused: Fused | None = None

    def match(self, event: Event, state: State) -> bool:
        """Run on the first FIT_START."""
        return event == Event.FIT_START and self.fused is None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Put the fused head in the place of the model's own."""
        refuse(Run(train_metrics=bool(state.train_metrics), fused_head=self.config))
        with warns_without_effect():
            self.fused = apply_fused_head(without_ddp(state.model), **self.options)
            log.info("%s", self.fused)
            logger.log_hyperparameters({"fused_head/head": self.fused.name})
