"""Model FLOPs utilisation that knows which GEMMs ran in FP8."""

from foundry_fp8.callbacks.mfu_monitor.census import Census, Observed
from foundry_fp8.callbacks.mfu_monitor.mfu_monitor import MFUMonitor, MFUMonitorConfig

__all__ = ["Census", "MFUMonitor", "MFUMonitorConfig", "Observed"]
