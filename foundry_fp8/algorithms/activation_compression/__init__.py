"""Activations kept in 8 or 4 bits between forward and backward. See README.md."""

from typing import TYPE_CHECKING, Any

from foundry_fp8.algorithms.activation_compression.apply import (
    ActivationCompressionConfig,
    CompressionReport,
    apply_activation_compression,
)

if TYPE_CHECKING:
    from foundry_fp8.algorithms.activation_compression.algorithm import ActivationCompression

__all__ = [
    "ActivationCompression",
    "ActivationCompressionConfig",
    "CompressionReport",
    "apply_activation_compression",
]


def __getattr__(name: str) -> Any:
    # The functional form needs torch alone; Composer is imported when the Algorithm is asked for.
    if name == "ActivationCompression":
        from foundry_fp8.algorithms.activation_compression.algorithm import ActivationCompression

        return ActivationCompression
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
