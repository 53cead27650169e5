"""FP8 health: amax, scale, saturation, underflow and quantisation noise of every converted GEMM operand."""

from foundry_fp8.callbacks.fp8_monitor.callback import FP8Monitor, FP8MonitorConfig

__all__ = ["FP8Monitor", "FP8MonitorConfig"]
