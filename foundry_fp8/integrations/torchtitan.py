"""FP8 as a model converter of torchtitan 0.2 (``torchtitan.protocols.model_converter``). It has never run under torchtitan's trainer.

torchtitan 0.3 has another protocol: converters of configurations. This is none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from foundry_fp8.config import ConfigError, from_mapping
from foundry_fp8.integrations.training_state import TrainingState
from foundry_fp8.surgery.apply import FP8Config, apply_fp8
from foundry_fp8.surgery.report import SurgeryReport

__all__ = ["FP8Converter", "fp8_converter"]

log = logging.getLogger(__name__)


class FP8Converter:
    """Converts before torchtitan parallelises, and finishes delayed scaling's pass after each optimizer step.

    Args:
        job_config: torchtitan's.
        parallel_dims: torchtitan's.

    Attributes:
        options: The fields of :class:`~foundry_fp8.surgery.apply.FP8Config`.
        reports: What became of every weight, by part of the pipeline.

    Raises:
        ConfigError: Tensor parallelism.
    """

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        if parallel_dims.tp_enabled:
            raise ConfigError(
                "model.converters: FP8 layers do not run under tensor parallelism. Use FSDP alone."
            )
        self.reports: list[SurgeryReport] = []

    def convert(self, model: nn.Module) -> None:
        """Convert ``model`` in place."""
        self.reports.append(apply_fp8(model, **self.options))
        log.info("%s", self.reports[-1].summary())

    def post_optimizer_hook(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Finish the running pass: a collective."""
        for part in [model] if isinstance(model, nn.Module) else model:
            TrainingState(part).finish_pass()


def fp8_converter(**options: Any) -> type[FP8Converter]:
    """The converter's class with these options, for ``register_model_converter``.

    Raises:
        ConfigError: Unknown option or value.
    """
    from_mapping(FP8Config, options, "fp8_converter")
    return type("FP8Converter", (FP8Converter,), {"options": dict(options)})
