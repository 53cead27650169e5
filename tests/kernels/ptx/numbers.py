"""PTX's types as numpy sees them, and its arithmetic.

Registers hold unsigned words; an operation reads them as its type says. ``approx`` and ``full`` operations, whose last bit the
hardware leaves open, are computed exactly.
"""

import re

import ml_dtypes
import numpy as np

from tests.kernels.ptx.memory import UNSIGNED

__all__ = ["BINARY", "COMPARE", "TYPES", "UNARY", "convert", "fma", "from_words", "to_words"]

TYPES = {
    **{f"{kind}{bits}": UNSIGNED[bits // 8] for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": ml_dtypes.bfloat16,
    "pred": np.bool_,
}
TYPES = {name: np.dtype(kind) for name, kind in TYPES.items()}
LIMITS = {"e4m3": (448.0, ml_dtypes.float8_e4m3fn), "e5m2": (57344.0, ml_dtypes.float8_e5m2)}


def from_words(words, kind):
    """The low bits of unsigned ``words`` as ``kind``; of packed pairs ``[threads, 2]``."""
    if kind == "pred":
        return words
    if kind.endswith("x2"):
        return words.astype(np.uint32).view(TYPES[kind[:-2]]).reshape(-1, 2)
    dtype = TYPES[kind]
    unsigned = UNSIGNED[dtype.itemsize]
    return (words if words.dtype == unsigned else words.astype(unsigned)).view(dtype)


def to_words(values, bits):
    """What a register of ``bits`` holds after ``values`` were written to it: signed integers extend their sign."""
    if bits == 1:
        return values.astype(np.bool_)
    if values.ndim == 2:
        return np.ascontiguousarray(values).view(np.uint32)[:, 0]
    unsigned = UNSIGNED[bits // 8]
    if values.dtype.kind == "i":
        return values.astype(f"int{bits}").view(unsigned)
    raw = np.ascontiguousarray(values).view(UNSIGNED[values.dtype.itemsize])
    return raw if raw.dtype == unsigned else raw.astype(unsigned)


def flushed(x):
    """``.ftz``: subnormals are zero, with their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def fma(a, b, c):
    """``a * b + c`` of float32, rounded once: the sum is rounded to odd in float64 first."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    first = total - product
    error = (product - (total - first)) + (addend - first)
    bits = np.ascontiguousarray(total).view(np.int64).copy()
    inexact = np.isfinite(total) & (error != 0)
    bits[inexact] = (bits[inexact] - (np.signbit(error) != np.signbit(total))[inexact]) | 1
    return bits.view(np.float64).astype(np.float32)


def _largest(a, b):
    if a.dtype.kind not in "fV":
        return np.maximum(a, b)
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def _least(a, b):
    if a.dtype.kind not in "fV":
        return np.minimum(a, b)
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


def _divided(a, b):
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b).astype(object)
    quotient = [
        abs(int(x)) // abs(int(y)) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(a, safe, strict=True)
    ]
    return np.array(quotient, dtype=np.int64).astype(a.dtype)


BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divided,
    "rem": lambda a, b: a - b * _divided(a, b),
    "max": _largest,
    "min": _least,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
UNARY = {
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "abs": lambda a: np.abs(a),
    "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(np.float32),
    "lg2": lambda a: np.log2(a.astype(np.float64)).astype(np.float32),
    "rcp": lambda a: np.float32(1) / a,
    "sqrt": lambda a: np.sqrt(a),
    "rsqrt": lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(np.float32),
    "tanh": lambda a: np.tanh(a.astype(np.float64)).astype(np.float32),
}


def _unordered(a, b):
    return (a != a) | (b != b)


COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & ~_unordered(a, b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "num": lambda a, b: ~_unordered(a, b),
    "nan": _unordered,
    **{f"{name}u": lambda a, b, not_=other: ~COMPARE[not_](a, b) for name, other in
       (("eq", "ne"), ("ne", "eq"), ("lt", "ge"), ("le", "gt"), ("gt", "le"), ("ge", "lt"))},
}  # fmt: skip


def convert(suffixes, sources):
    """``cvt``: the values of the destination, typed."""
    to, source = suffixes[-2:]
    if source in ("e4m3x2", "e5m2x2"):
        return sources[0].view(LIMITS[source[:4]][1]).reshape(-1, 2).astype(np.float16)
    narrow = re.fullmatch(r"(e4m3|e5m2|bf16|f16)x2", to)
    if narrow:  # two sources, the first to the upper half
        high, low = sources
        return _pack(narrow[1], "satfinite" in suffixes, high, low)
    (value,) = sources
    target = TYPES[to]
    if target.kind in "iu" and value.dtype.kind in "fV":
        return _to_integer(value.astype(np.float64), suffixes, target)
    if target.kind in "fV":
        if value.dtype.kind in "fV" and {"rzi", "rni", "rmi", "rpi"} & set(suffixes):
            value = _rounded(value.astype(np.float64), suffixes)
        return (value if value.dtype.kind in "iu" else value.astype(np.float64)).astype(target)
    return value.astype(target)


def _pack(name, saturates, high, low):
    if name in LIMITS:
        limit, target = LIMITS[name]
        clamp = [np.where(np.isnan(x), x, np.clip(x, -limit, limit)) for x in (low, high)]
        low, high = (
            x.astype(np.float32) if saturates else y for x, y in zip(clamp, (low, high), strict=True)
        )
        return np.stack([low.astype(target), high.astype(target)], 1).view(np.uint16)[:, 0]
    target = TYPES[name]
    return np.stack([low.astype(target), high.astype(target)], 1)


def _rounded(value, suffixes):
    for name, function in (("rzi", np.trunc), ("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil)):
        if name in suffixes:
            return function(value)
    raise KeyError(f"no rounding in {suffixes}")


def _to_integer(value, suffixes, target):
    value = np.where(np.isnan(value), 0.0, _rounded(value, suffixes))
    limits = np.iinfo(target)
    high, low = value >= float(limits.max), value <= float(limits.min)
    inside = np.where(high | low, 0.0, value).astype(target)
    return np.where(high, limits.max, np.where(low, limits.min, inside)).astype(target)
