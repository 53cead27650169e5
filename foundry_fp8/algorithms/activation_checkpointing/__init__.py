"""Activation checkpointing of chosen modules on any decoder, or planned from a memory budget. See README.md."""

from typing import TYPE_CHECKING, Any

from foundry_fp8.algorithms.activation_checkpointing.apply import (
    ActivationCheckpointingConfig,
    CheckpointingReport,
    apply_activation_checkpointing,
)

if TYPE_CHECKING:
    from foundry_fp8.algorithms.activation_checkpointing.algorithm import ActivationCheckpointing

__all__ = [
    "ActivationCheckpointing",
    "ActivationCheckpointingConfig",
    "CheckpointingReport",
    "apply_activation_checkpointing",
]


def __getattr__(name: str) -> Any:
    # The functional form needs torch alone; Composer is imported when the Algorithm is asked for.
    if name == "ActivationCheckpointing":
        from foundry_fp8.algorithms.activation_checkpointing.algorithm import ActivationCheckpointing

        return ActivationCheckpointing
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
