"""The Composer algorithm ``activation_checkpointing``. See README.md."""

from foundry_fp8.algorithms.activation_checkpointing.algorithm import ActivationCheckpointing

__all__ = ["ActivationCheckpointing"]
