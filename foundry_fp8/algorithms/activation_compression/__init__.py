"""The Composer algorithm ``activation_compression``. See README.md."""

from foundry_fp8.algorithms.activation_compression.algorithm import ActivationCompression

__all__ = ["ActivationCompression"]
