"""The Composer algorithm ``compressed_communication``. See README.md."""

from foundry_fp8.algorithms.compressed_communication.algorithm import CompressedCommunication

__all__ = ["CompressedCommunication"]
