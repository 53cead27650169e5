"""Model FLOPs utilisation that knows which GEMMs ran in FP8."""

from foundry_fp8.callbacks.mfu_monitor.callback import MFUMonitor, MFUMonitorConfig

__all__ = ["MFUMonitor", "MFUMonitorConfig"]
