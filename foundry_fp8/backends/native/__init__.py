"""FP8 on CUDA with torch and Triton alone: no build step, eager or compiled.

``backend.py`` says where it runs and which layers it takes, ``linear.py`` puts the three GEMMs together as one autograd
function, ``ops.py`` shows the kernels to torch (and to ``torch.compile``), ``gemm.py`` multiplies.
"""

from foundry_fp8.backends.native.backend import NativeBackend

__all__ = ["NativeBackend"]
