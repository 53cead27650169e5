"""FP8 on any device: operands are quantised exactly as on the hardware, products run on the units that there are.

``quantizers.py`` makes the FP8 operands (the reference of :mod:`foundry_fp8.numerics.quantize`, or a fast CPU path with the same
bytes), ``gemm.py`` multiplies them (``hopper.py``: as Hopper's tensor cores add up), ``backend.py`` puts the three GEMMs of a
linear together.
"""

from foundry_fp8.backends.emulated.backend import EmulatedBackend

__all__ = ["EmulatedBackend"]
