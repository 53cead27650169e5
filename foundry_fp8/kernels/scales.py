"""Device functions: amax to scale, E8M0, what is not finite. Each is the Triton form of a torch function named in its docstring."""

import triton
import triton.language as tl

__all__ = [
    "amax_along", "e8m0_reciprocal", "e8m0_round_up", "is_inf", "magnitude", "nan_for_inf", "power_2_scale",
    "reciprocal", "scale_from_amax",
]  # fmt: skip

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
INF = tl.constexpr(float("inf"))
LARGE_SCALE = tl.constexpr(2.0**126)
DOWN_64 = tl.constexpr(2.0**-64)
EXPONENT_BITS = tl.constexpr(-0x800000)  # sign and exponent of a float32


@triton.jit
def is_inf(x):
    """``torch.isinf`` of values that are not negative."""
    return x == INF


@triton.jit
def nan_for_inf(x):
    """``x`` with NaN where it is +-Inf, which a saturating conversion would hide."""
    return tl.where(is_inf(tl.abs(x)), float("nan"), x)


@triton.jit
def magnitude(x):
    """``foundry_fp8.numerics.quantize.amax_of`` before the reduction: |x|, 0 for NaN."""
    return tl.where(x != x, 0.0, tl.abs(x))


@triton.jit
def amax_along(x, axis: tl.constexpr):
    """``foundry_fp8.numerics.quantize.amax_of`` along one axis. ``tl.max`` itself leaves NaN out, so that only a result can be NaN."""
    found = tl.max(tl.abs(x), axis=axis)
    return tl.where(found == found, found, 0.0)


@triton.jit
def scale_from_amax(amax, FMT_MAX: tl.constexpr, POWER_2: tl.constexpr, VALUE_FOR_INF: tl.constexpr):
    """``foundry_fp8.numerics.quantize.scale_from_amax``. ``div_rn``, because Triton's ``/`` is an approximation.

    It flushes subnormals, which changes nothing here: a subnormal amax overflows the quotient either way.
    """
    usable = (amax > 0) & (amax < INF)
    scale = tl.div_rn(tl.full(amax.shape, FMT_MAX, tl.float32), tl.where(usable, amax, 1.0))
    scale = tl.where(is_inf(scale), VALUE_FOR_INF, scale)
    if POWER_2:
        scale = (scale.to(tl.int32, bitcast=True) & EXPONENT_BITS).to(tl.float32, bitcast=True)
    return tl.where(usable, scale, 1.0)


@triton.jit
def power_2_scale(amax, FMT_MAX: tl.constexpr, VALUE_FOR_INF: tl.constexpr):
    """``(scale, 1 / scale)`` of :func:`scale_from_amax` with ``POWER_2``, without dividing: a block kernel makes many.

    ``FMT_MAX / amax`` rounded down to a power of two is the difference of the exponents, less one where the mantissa of
    amax is above that of FMT_MAX, which is 1.75 in both formats. The quotient's own rounding never lifts it to the next power.
    """
    bits = amax.to(tl.int32, bitcast=True)
    exponent = bits >> 23
    of_max = tl.full(amax.shape, FMT_MAX, tl.float32).to(tl.int32, bitcast=True) >> 23
    for_inf = tl.full(amax.shape, VALUE_FOR_INF, tl.float32).to(tl.int32, bitcast=True) >> 23
    scale = of_max + 127 - exponent - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    scale = tl.where((exponent == 0) | (scale > 254), for_inf, scale)
    scale = tl.where((amax > 0) & (amax < INF), scale, 127)
    inverse = tl.where(scale < 254, (254 - scale) << 23, 0x400000)  # 2**-127 is subnormal
    return (scale << 23).to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(scale):
    """``1.0 / scale``, rounded to nearest even.

    The quotient of a scale above 2**126 is subnormal, and Triton's division flushes subnormals to zero; its multiplication
    does not. So that case divides in a smaller range and multiplies out of it: exact for powers of two, otherwise within
    one subnormal step.
    """
    large = scale > LARGE_SCALE
    near = tl.where(large, scale * DOWN_64, scale)
    quotient = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), near)
    return tl.where(large, quotient * DOWN_64, quotient)


@triton.jit
def e8m0_round_up(x):
    """``foundry_fp8.numerics.formats.e8m0_round_up``, as int32; ``x`` is neither negative nor NaN."""
    bits = x.to(tl.int32, bitcast=True)
    # One more than the exponent where there is a mantissa, by its carry; codes 0 and 1 meet inside the subnormals, at 2**-127.
    return tl.where(bits <= 0x400000, 0, tl.minimum((bits + 0x7FFFFF) >> 23, 254))


@triton.jit
def e8m0_reciprocal(code):
    """1 / ``foundry_fp8.numerics.formats.e8m0_decode`` of an int32 code from 0 to 254."""
    bits = tl.where(code == 254, 0x400000, (254 - code) << 23)  # 2**-127 is subnormal
    return bits.to(tl.float32, bitcast=True)
