"""The scalings that have kernels, each in a file: how an operand is quantised, and how two are multiplied. Needs Triton."""

from __future__ import annotations

from foundry_fp8.backends.native.scaling.base import NativeScaling
from foundry_fp8.backends.native.scaling.block import BlockKernels
from foundry_fp8.backends.native.scaling.mx import MXKernels
from foundry_fp8.backends.native.scaling.rows import RowKernels
from foundry_fp8.backends.native.scaling.tensor import ConstantKernels, TensorKernels

__all__ = ["SCALINGS", "NativeScaling"]

SCALINGS: dict[str, NativeScaling] = {
    scaling.kind: scaling
    for scaling in (TensorKernels(), RowKernels(), ConstantKernels(), BlockKernels(), MXKernels())
}
"""By :attr:`Recipe.kind <foundry_fp8.numerics.recipes.Recipe.kind>`."""
