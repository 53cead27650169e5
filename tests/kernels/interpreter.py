"""Run the kernels without a GPU: under Triton's interpreter, with its float conversions repaired.

``TRITON_INTERPRET=1`` acts when a kernel is decorated, that is, on whoever imports it first in this process, and on every
child process. So it is set for the length of a test only, and the kernels that are compiled by then are exchanged for
interpreted ones.

The interpreter of Triton 3.3 converts floats with its own routine: its float8 cast rounds ties away from zero, drops the carry
out of the mantissa, mangles subnormals and turns NaN into a number; its bfloat16 cast truncates. The hardware does none of
that (``cvt.rn.satfinite``), so ``convert_float`` takes its place: round to nearest even and saturate, by ml_dtypes. With it the kernels are compared bit
for bit, ties included. ``test_interpreter.py`` shows the difference, and fails once the repair is no longer needed.
"""

import importlib

import ml_dtypes
import numpy as np
import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from tests.kernels.launch_caches import use_empty_caches
from tests.kernels.quick_interpreter import remember

# Triton's own library (cdiv, sum, max, ...) is decorated like a kernel.
MODULES = (
    "triton.language",
    "triton.language.random",
    "triton.language.standard",
    *(
        f"foundry_fp8.kernels.{name}"
        for name in (
            "scales",
            "producers",
            "interleaved",
            "tensorwise",
            "blockwise",
            "block_gemm",
            "delayed",
            "dequantize",
            "norms",
            "gated",
            "grouped",
            "packing",
            "wire",
        )
    ),
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUMPY = {
    "fp64": np.float64,
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
}
interpreters_own_convert_float = interpreter._convert_float
interpreters_own_maxnumf = interpreter.InterpreterBuilder.create_maxnumf
interpreters_own_min_max = interpreter.ReduceOps.min_max


def convert_float(input, input_dtype, output_dtype, rounding_mode):
    """Drop-in for ``triton.runtime.interpreter._convert_float``: bits in, bits out."""
    source, target = NUMPY[str(input_dtype)], NUMPY[str(output_dtype)]
    with np.errstate(all="ignore"):
        values = np.ascontiguousarray(input).view(source).reshape(input.shape)
        values = values.astype(np.float32)
        if str(output_dtype).startswith("fp8"):  # cvt.rn.satfinite
            largest = float(ml_dtypes.finfo(target).max)
            values = np.clip(values, -largest, largest)
        converted = values.astype(target)
    return converted.view(f"uint{np.dtype(target).itemsize * 8}")


def without_nan(reduction):
    """``np.max`` and ``np.min`` as the hardware's ``max.f32`` and Triton 3.6's own interpreter: NaN is left out."""
    return {np.max: np.nanmax, np.min: np.nanmin}.get(reduction, reduction)


def min_max(self, input, val_reduce_op, idx_reduce_op=None):
    """Drop-in for ``ReduceOps.min_max``."""
    return interpreters_own_min_max(self, input, without_nan(val_reduce_op), idx_reduce_op)


def maxnumf(self, lhs, rhs):
    """Drop-in for ``InterpreterBuilder.create_maxnumf``, which hands NaN on; the instruction leaves it out."""
    return self.binary_op(lhs, rhs, np.fmax)


def interpret(monkeypatch):
    """Interpret the kernels, with exact casts, until ``monkeypatch`` is undone."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_maxnumf", maxnumf)
    monkeypatch.setattr(interpreter.ReduceOps, "min_max", min_max)
    remember(monkeypatch)
    use_empty_caches(monkeypatch)
    interpreted = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                # By identity: a kernel's own hash reads the kernels that it calls, which may be interpreted by now.
                if id(value) not in interpreted:
                    interpreted[id(value)] = interpreter.InterpretedFunction(value.fn)
                monkeypatch.setattr(module, attribute, interpreted[id(value)])


def only_from(monkeypatch, first, module, *kernels):
    """Of these kernels of ``module`` only the programs from ``first`` on run: tensors past 2**31 elements are asked for and, but for
    what those programs take, never touched. Skips on a GPU."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter's programs can be chosen, a GPU's cannot")
    builder = interpreter.interpreter_builder

    class Last:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            assert grid[0] > first
            return self.kernel[(grid[0] - first, *grid[1:])]

    monkeypatch.setattr(
        builder, "set_grid_idx", lambda x, y, z: setattr(builder, "grid_idx", (x + first, y, z))
    )
    for name in kernels:
        monkeypatch.setattr(module, name, Last(getattr(module, name)))


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Where kernels run: the GPU if there is one, otherwise the CPU, interpreted."""
    if DEVICE == "cpu":
        interpret(monkeypatch)
    return DEVICE
