"""Kernel tests: on the GPU where there is one, otherwise under Triton's interpreter with its casts repaired.

The interpreter of Triton 3.3 to 3.6 converts floats with its own routine. Its float8 cast rounds ties away from zero, loses the
carry out of the mantissa, mangles subnormals and turns NaN into a finite number, and its bfloat16 cast truncates. None of
that is what the hardware does, so ``exact_casts`` replaces the routine by ml_dtypes' conversions, which round to nearest even.
``test_interpreter.py`` shows the difference, and fails once the interpreter is right and this can go.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any kernel is imported

import pytest

from tests.kernels.exact_casts import exact_casts


@pytest.fixture(autouse=True)
def _exact_casts(monkeypatch):
    if not torch.cuda.is_available():
        exact_casts(monkeypatch)


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
