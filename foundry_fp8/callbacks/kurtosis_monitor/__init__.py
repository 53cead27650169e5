"""Kurtosis of activations, layer by layer: outliers before they hurt."""

from foundry_fp8.callbacks.kurtosis_monitor.callback import KurtosisMonitor, KurtosisMonitorConfig

__all__ = ["KurtosisMonitor", "KurtosisMonitorConfig"]
