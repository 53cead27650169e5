"""FLOPs of a decoder, peaks of a device, and what their ratio means. Imports torch alone."""

from foundry_fp8.observe.flops.attention import attention_shapes
from foundry_fp8.observe.flops.gemms import gemms_of
from foundry_fp8.observe.flops.utilisation import utilisation

__all__ = ["attention_shapes", "gemms_of", "utilisation"]
