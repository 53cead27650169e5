"""FP8 as a model converter of torchtitan 0.2 (``torchtitan.protocols.model_converter``). It has never run under torchtitan's trainer.

torchtitan 0.3 has another protocol: converters of configurations. This is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from foundry_fp8.run.fp8_run import FP8Run
from foundry_fp8.run.settings import Run
from foundry_fp8.run.training_state import FP8Parts
from foundry_fp8.surgery.report import SurgeryReport

__all__ = ["FP8Converter", "fp8_converter"]


class FP8Converter:
    """Converts before torchtitan parallelises, and finishes delayed scaling's pass after each optimizer step.

    Args:
        job_config: torchtitan's.
        parallel_dims: torchtitan's.

    Attributes:
        options: The fields of :class:`~foundry_fp8.surgery.fp8_config.FP8Config`.
        reports: What became of every weight, by part of the pipeline.
    """

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        self.settings = Run(trainer="torchtitan")
        self.reports: list[SurgeryReport | None] = []

    def convert(self, model: nn.Module) -> None:
        """Convert ``model`` in place."""
        self.reports.append(FP8Run(settings=self.settings, **self.options).convert(model))

    def post_optimizer_hook(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Finish the running pass: a collective."""
        for part in [model] if isinstance(model, nn.Module) else model:
            FP8Parts(part).finish_pass()


def fp8_converter(**options: Any) -> type[FP8Converter]:
    """The converter's class with these options, for ``register_model_converter``.

    Raises:
        ConfigError: Unknown option or value.
    """
    FP8Run(settings=Run(trainer="torchtitan"), **options)
    return type("FP8Converter", (FP8Converter,), {"options": dict(options)})
