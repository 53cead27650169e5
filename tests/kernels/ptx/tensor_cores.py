"""Hopper's warpgroup product, by its definition in the PTX manual, summed exactly."""

import re

import ml_dtypes
import numpy as np

from tests.kernels.ptx.numbers import LIMITS

__all__ = ["wgmma"]

SWIZZLE_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}


def wgmma(suffixes, shared, a, b, accumulator, base, *, transposed=False):
    """``accumulator + a @ b``.

    Args:
        suffixes: ``m64n128k32``, ..., the formats of a and b.
        shared: The block's shared memory, bytes.
        a: Each thread's descriptor of ``[64, K]``, contiguous along K; or its four registers.
        b: Each thread's descriptor of ``[N, K]``.
        accumulator: float32 ``[threads, N / 2]``.
        base: The address of the first byte of ``shared``.
        transposed: ``b`` is contiguous along N.
    """
    shape = next(re.fullmatch(r"m64n(\d+)k(16|32)", s) for s in suffixes if s.startswith("m64"))
    n, (left_type, right_type) = int(shape[1]), map(dtype_of, suffixes[-2:])
    out = accumulator.copy()
    for group in range(len(accumulator) // 128):
        threads = slice(128 * group, 128 * (group + 1))
        if isinstance(a, list):
            left = fragment([words[threads] for words in a], left_type)
        else:
            left = matrix(shared, a[threads][0], 64, base).view(left_type)
        read = matrix_along_n if transposed else matrix
        right = read(shared, b[threads][0], n, base).view(right_type)
        products = left.astype(np.float64) @ right.astype(np.float64).T
        thread, i = np.arange(128)[:, None], np.arange(n // 2)[None, :]
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
        column = i // 4 * 8 + thread % 4 * 2 + i % 2
        out[threads] = (accumulator[threads] + products[row, column]).astype(np.float32)
    return out


def dtype_of(suffix):
    return ml_dtypes.bfloat16 if suffix == "bf16" else LIMITS[suffix][1]


def fragment(words, dtype):
    """``[64, 32 bytes]`` of four registers a thread; "Register Fragments for wgmma", matrix A: both sizes of elements have bytes alike."""
    out, thread = np.zeros((64, 32), np.uint8), np.arange(128)
    for register, word in enumerate(words):
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register % 2)
        first = 16 * (register // 2) + 4 * (thread % 4)
        out[row[:, None], first[:, None] + np.arange(4)] = word.view(np.uint8).reshape(-1, 4)
    return out.view(dtype)


def fields(descriptor):
    """Start, leading and stride offsets in bytes, and the width of the swizzle."""
    descriptor = int(descriptor)
    width = SWIZZLE_BYTES[descriptor >> 62]
    assert width >= 32, "a layout without swizzle is not known here"
    return *((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32)), width


def swizzled(address, width):
    return address ^ (address >> 7 & (width // 16 - 1)) << 4


def matrix(shared, descriptor, rows, base):
    """The ``[rows, 32]`` bytes that a descriptor names; "Asynchronous Warpgroup Level Matrix Shared Memory Layout"."""
    start, _, stride, width = fields(descriptor)
    row, byte = np.arange(rows)[:, None], np.arange(32)[None, :]
    address = swizzled(start + row // 8 * stride + row % 8 * width + byte, width)
    return np.ascontiguousarray(shared[address - base])


def matrix_along_n(shared, descriptor, rows, base):
    """The same ``[rows, 16 elements of 2 bytes]`` where it lies contiguous along the rows: 8 elements of K by ``width`` bytes at a time."""
    start, leading, stride, width = fields(descriptor)
    row, k, byte = np.arange(rows)[:, None, None], np.arange(16)[None, :, None], np.arange(2)
    along = 2 * row + byte
    address = start + along // width * leading + k // 8 * stride + k % 8 * width + along % width
    return np.ascontiguousarray(shared[swizzled(address, width) - base]).reshape(rows, 32)
