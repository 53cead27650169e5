"""Compressed gradient and parameter communication. The functional form needs torch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foundry_fp8.algorithms.compressed_communication.config import CompressionConfig
from foundry_fp8.algorithms.compressed_communication.functional import apply_compressed_communication
from foundry_fp8.algorithms.compressed_communication.runtime import Compression

if TYPE_CHECKING:
    from foundry_fp8.algorithms.compressed_communication.algorithm import CompressedCommunication

__all__ = ["CompressedCommunication", "Compression", "CompressionConfig", "apply_compressed_communication"]


def __getattr__(name: str) -> Any:
    if name == "CompressedCommunication":
        from foundry_fp8.algorithms.compressed_communication.algorithm import CompressedCommunication

        return CompressedCommunication
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
