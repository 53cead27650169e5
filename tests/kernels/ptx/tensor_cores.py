"""Hopper's warpgroup product of FP8 operands in shared memory, by its definition in the PTX manual, summed exactly."""

import re

import numpy as np

from tests.kernels.ptx.numbers import LIMITS

__all__ = ["wgmma"]

SWIZZLE_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}


def wgmma(suffixes, shared, a, b, accumulator, base):
    """``accumulator + a @ b``.

    Args:
        suffixes: ``m64n128k32``, ..., the formats of a and b.
        shared: The block's shared memory, bytes.
        a: Each thread's descriptor of ``[64, 32]``, contiguous along K.
        b: The same of ``[N, 32]``.
        accumulator: float32 ``[threads, N / 2]``.
        base: The address of the first byte of ``shared``.
    """
    shape = next(re.fullmatch(r"m64n(\d+)k32", s) for s in suffixes if s.startswith("m64"))
    n, formats = int(shape[1]), suffixes[-2:]
    out = accumulator.copy()
    for group in range(len(a) // 128):
        threads = slice(128 * group, 128 * (group + 1))
        left = matrix(shared, a[threads][0], 64, base).view(LIMITS[formats[0]][1]).astype(np.float64)
        right = matrix(shared, b[threads][0], n, base).view(LIMITS[formats[1]][1]).astype(np.float64)
        thread, i = np.arange(128)[:, None], np.arange(n // 2)[None, :]
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
        column = i // 4 * 8 + thread % 4 * 2 + i % 2
        out[threads] = (accumulator[threads] + (left @ right.T)[row, column]).astype(np.float32)
    return out


def matrix(shared, descriptor, rows, base):
    """The ``[rows, 32]`` bytes that a descriptor names; "Asynchronous Warpgroup Level Matrix Shared Memory Layout"."""
    descriptor = int(descriptor)
    start = (descriptor & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    width = SWIZZLE_BYTES[descriptor >> 62]
    row, byte = np.arange(rows)[:, None], np.arange(32)[None, :]
    assert width >= 32, "a layout without swizzle is not known here"
    address = start + row // 8 * stride + row % 8 * width + byte
    address ^= (address >> 7 & (width // 16 - 1)) << 4
    return np.ascontiguousarray(shared[address - base])
