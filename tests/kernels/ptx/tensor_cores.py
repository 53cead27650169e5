"""Hopper's warpgroup product, by its definition in the PTX manual, summed exactly."""

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
        a: Each thread's descriptor of ``[64, K]``, contiguous along K.
        b: Each thread's descriptor of ``[N, K]``.
        accumulator: float32 ``[threads, N / 2]``.
        base: The address of the first byte of ``shared``.
    """
    shape = next(re.fullmatch(r"m64n(\d+)k32", s) for s in suffixes if s.startswith("m64"))
    n, (left_type, right_type) = int(shape[1]), (LIMITS[suffix][1] for suffix in suffixes[-2:])
    out = accumulator.copy()
    for group in range(len(accumulator) // 128):
        threads = slice(128 * group, 128 * (group + 1))
        left = matrix(shared, a[threads][0], 64, base).view(left_type)
        right = matrix(shared, b[threads][0], n, base).view(right_type)
        products = left.astype(np.float64) @ right.astype(np.float64).T
        thread, i = np.arange(128)[:, None], np.arange(n // 2)[None, :]
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
        column = i // 4 * 8 + thread % 4 * 2 + i % 2
        out[threads] = (accumulator[threads] + products[row, column]).astype(np.float32)
    return out


def fields(descriptor):
    """Start and stride in bytes, and the width of the swizzle."""
    descriptor = int(descriptor)
    width = SWIZZLE_BYTES[descriptor >> 62]
    assert width >= 32, "a layout without swizzle is not known here"
    return *((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 32)), width


def swizzled(address, width):
    return address ^ (address >> 7 & (width // 16 - 1)) << 4


def matrix(shared, descriptor, rows, base):
    """The ``[rows, 32]`` bytes that a descriptor names; "Asynchronous Warpgroup Level Matrix Shared Memory Layout"."""
    start, stride, width = fields(descriptor)
    row, byte = np.arange(rows)[:, None], np.arange(32)[None, :]
    address = swizzled(start + row // 8 * stride + row % 8 * width + byte, width)
    return np.ascontiguousarray(shared[address - base])
