"""FLOPs of a decoder, peaks of a device, and what their ratio means. Imports torch alone.

``gemms`` counts the linear layers, ``attention`` the attended pairs, ``peaks`` says what a device could do, and
``utilisation`` divides one by the other.
"""

from foundry_fp8.observe.flops.attention import AttentionShape, attended_pairs, attention_shapes, packed_pairs
from foundry_fp8.observe.flops.gemms import Gemm, gemms_of, uncounted_matrices
from foundry_fp8.observe.flops.peaks import Peaks, measured_peaks, peaks_of
from foundry_fp8.observe.flops.utilisation import Flops, utilisation

__all__ = [
    "AttentionShape",
    "Flops",
    "Gemm",
    "Peaks",
    "attended_pairs",
    "attention_shapes",
    "gemms_of",
    "measured_peaks",
    "packed_pairs",
    "peaks_of",
    "uncounted_matrices",
    "utilisation",
]
