"""Kurtosis of activations, layer by layer: outliers before they hurt."""

from foundry_fp8.callbacks.kurtosis_monitor.kurtosis import kurtosis_per_sample, kurtosis_per_token, row_sums
from foundry_fp8.callbacks.kurtosis_monitor.kurtosis_monitor import KurtosisMonitor, KurtosisMonitorConfig
from foundry_fp8.callbacks.kurtosis_monitor.taps import PRESETS, Tap, find_taps

__all__ = [
    "PRESETS",
    "KurtosisMonitor",
    "KurtosisMonitorConfig",
    "Tap",
    "find_taps",
    "kurtosis_per_sample",
    "kurtosis_per_token",
    "row_sums",
]
