"""Float conversions for Triton's interpreter, as the hardware does them."""

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

NUMPY = {
    "fp32": np.float32,
    "fp16": np.float16,
    "fp64": np.float64,
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
}
broken_convert_float = interpreter._convert_float


def convert_float(input, input_dtype, output_dtype, rounding_mode):
    """Drop-in for ``triton.runtime.interpreter._convert_float``: same bits in, round to nearest even, same bits out."""
    source, target = NUMPY[str(input_dtype)], NUMPY[str(output_dtype)]
    values = np.ascontiguousarray(input).view(source).reshape(input.shape)
    with np.errstate(all="ignore"):
        converted = values.astype(np.float32).astype(target)
    return converted.view(f"uint{np.dtype(target).itemsize * 8}")


def exact_casts(monkeypatch):
    """Install :func:`convert_float` until ``monkeypatch`` undoes it."""
    assert tl.float8e4nv.name == "fp8e4nv"
    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
