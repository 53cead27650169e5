"""FP8 health: amax, scale, saturation, underflow and quantisation noise of every converted GEMM operand."""

from foundry_fp8.callbacks.fp8_monitor.fp8_monitor import FP8Monitor, FP8MonitorConfig
from foundry_fp8.callbacks.fp8_monitor.health import Health, HealthProbe, measure

__all__ = ["FP8Monitor", "FP8MonitorConfig", "Health", "HealthProbe", "measure"]
