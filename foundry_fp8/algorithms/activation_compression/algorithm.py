"""The Composer Algorithm."""

from __future__ import annotations

import logging
from typing import Any

from composer.core import Event, State
from composer.loggers import Logger

from foundry_fp8.activations.compression.apply import (
    ActivationCompressionConfig,
    CompressionReport,
    apply_activation_compression,
)
from foundry_fp8.algorithms.method import Method, warns_without_effect
from foundry_fp8.compat.compiled_model import is_compiled
from foundry_fp8.model_structure.wrappers import without_ddp
from foundry_fp8.run.clashes import refuse
from foundry_fp8.run.settings import Run

__all__ = ["ActivationCompression"]

log = logging.getLogger(__name__)


class ActivationCompression(Method):
    """Keeps what the blocks save for backward in 8 or 4 bits.

    Runs once, on ``Event.FIT_START``: after activation checkpoints (``Event.AFTER_LOAD``), whatever the order in the YAML.

    Args:
        **options: The fields of :class:`ActivationCompressionConfig`.

    Attributes:
        report: What was attached where; ``None`` before ``Event.FIT_START``.
    """

    config_class = ActivationCompressionConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.report: CompressionReport | None = None

    def match(self, event: Event, state: State) -> bool:
        """Run on the first FIT_START."""
        return event == Event.FIT_START and self.report is None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Put the compressing hooks on the model, once it is wrapped."""
        compiled = is_compiled(state.model)
        refuse(Run(fsdp=state.fsdp_config, compiled=compiled, activation_compression=self.config))
        with warns_without_effect():
            self.report = apply_activation_compression(without_ddp(state.model), **self.options)
            log.info("%s", self.report)
            logger.log_hyperparameters({"activation_compression/modules": len(self.report.rows)})
