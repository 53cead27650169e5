"""What a quantise kernel reads: a stored tensor, or a norm, an activation or an activation's gradient computed on the fly.

:func:`load_tile` gives the amax kernels their tile, and every other quantise kernel the four interleaved parts of its tile
(:mod:`foundry_fp8.kernels.interleaved`). With ``Producer.identity`` that is a load; with another producer the value is computed
in registers and never written to memory in high precision. It is rounded to the dtype of its input before it is quantised,
as the unfused module would have written it: what differs is the last bit of an elementary function, seldom a code (tests allow 0.5 %).

Each producer's definition in torch is :meth:`Producer.reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels import sources
from foundry_fp8.kernels.launch import AS_WRITTEN, launch, tiles
from foundry_fp8.kernels.sources import ACTIVATIONS, Producer

__all__ = ["ACTIVATIONS", "Producer", "load_tile", "produce"]

# What kernels compare with; :mod:`foundry_fp8.kernels.sources` says what each is.
IDENTITY = tl.constexpr(0)
NORM = tl.constexpr(sources.NORM)
SILU = tl.constexpr(ACTIVATIONS["silu"])
GELU = tl.constexpr(ACTIVATIONS["gelu"])
ROUNDED_NORM = tl.constexpr(sources.ROUNDED_NORM)
GRADIENT = tl.constexpr(sources.GRADIENT)
GRADIENT_OF_UP = tl.constexpr(sources.GRADIENT_OF_UP)

LOG2_E = tl.constexpr(1.4426950408889634)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def sigmoid(x):
    """``torch.sigmoid``, for |x| < 1 within about 2^-20.7 by adding worst cases up; far below 0 the exponent's rounding grows with x.
    The reciprocal is a square (2^-21.6): one instruction and a product, where Triton's division (2^-22) takes eight.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def gelu_sigmoid(x):
    """``(1 + torch.tanh(u)) / 2`` of tanh-GELU: ``sigmoid(2 u)``, where ``u = sqrt(2 / pi) (x + 0.044715 x^3)``."""
    return sigmoid(x * tl.fma(x * x, 2.0 * SQRT_2_OVER_PI * GELU_CUBIC, 2.0 * SQRT_2_OVER_PI))


@triton.jit
def normal_cdf(x):
    """``torch.special.ndtr``, which ``(1 + erf) / 2`` is: within 2e-7, and down to x = -3.5 within 4e-6 of itself, where ``1 + erf`` has cancelled
    (2e-4). libdevice's erf takes 23 instructions more.

    ``log2(ndtr(-|x|))`` is nearly a parabola: the polynomial of degree 8 that is -1 at 0 and on [0, 5.6] has the least largest error times
    ``ndtr(-|x|) ** 0.4``. Its highest coefficient is negative, so that infinities come to 0 and 1.
    """
    u = tl.abs(x)
    p = tl.fma(u, tl.fma(u, -7.12578014e-07, 1.18802773e-05), -4.44961624e-05)
    p = tl.fma(u, tl.fma(u, tl.fma(u, p, -5.07802761e-04), 7.58517627e-03), -5.28790206e-02)
    below = tl.exp2(tl.fma(u, tl.fma(u, tl.fma(u, p, -4.59078759e-01), -1.15111959e00), -1.0))
    return tl.where(x > 0, 1.0 - below, below)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation of a float32 tile; :meth:`Producer.reference` is its definition. NaN stays NaN."""
    if KIND == SILU:
        return x * sigmoid(x)
    elif KIND == GELU:
        return x * normal_cdf(x)
    else:
        return x * gelu_sigmoid(x)


@triton.jit
def derivative(x, KIND: tl.constexpr):
    """D activation / dx of a float32 tile."""
    if KIND == SILU:
        s = sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif KIND == GELU:
        return normal_cdf(x) + x * INV_SQRT_2PI * tl.exp2(x * x * (-0.5 * LOG2_E))
    else:
        s = gelu_sigmoid(x)
        return s * (1.0 + x * (1.0 - s) * 2.0 * SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * x * x))


@triton.jit
def load_tile(
    x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr,
    first_row, first_column, R, C,
    KIND: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, STEP: tl.constexpr = 1,
):  # fmt: skip
    """The float32 tile at ``first_row, first_column``: the produced value in the dtype of ``x``, 0 outside ``[R, C]``.

    ``STEP``: from one of its rows to the next.
    """
    # One 64-bit base, 32-bit offsets inside the tile: tensors may pass 2**31 elements, registers are scarce.
    local_rows = tl.arange(0, TILE_R) * STEP
    local_columns = tl.arange(0, TILE_C)
    rows = first_row + local_rows
    columns = first_column + local_columns
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    tile_ptr = x_ptr + tl.cast(first_row, tl.int64) * x_stride + first_column
    x = tl.load(tile_ptr + (local_rows[:, None] * x_stride + local_columns[None, :]), mask=inside, other=0.0)
    hp = x_ptr.dtype.element_ty
    x = x.to(tl.float32)
    if KIND == NORM or KIND == ROUNDED_NORM:  # noqa: SIM109 - Triton has no `in`
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + rows, mask=rows < R, other=0.0)[:, None]
        x *= tl.load(rstd_ptr + rows, mask=rows < R, other=0.0)[:, None]
        if KIND == ROUNDED_NORM:
            x = x.to(hp).to(tl.float32)
        if weight_ptr is not None:
            x *= tl.load(weight_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
        if bias_ptr is not None:
            x += tl.load(bias_ptr + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
        x = x.to(hp).to(tl.float32)
    elif KIND > GRADIENT:
        dy_ptr = weight_ptr + tl.cast(first_row, tl.int64) * C + first_column
        offsets = local_rows[:, None] * C + local_columns[None, :]
        dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        if KIND > GRADIENT_OF_UP:
            x = dy * activate(x, KIND - GRADIENT_OF_UP).to(hp).to(tl.float32)
        else:
            if up_ptr is not None:
                tile_ptr = up_ptr + tl.cast(first_row, tl.int64) * up_stride + first_column
                offsets = local_rows[:, None] * up_stride + local_columns[None, :]
                dy *= tl.load(tile_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
                dy = dy.to(hp).to(tl.float32)
            x = dy * derivative(x, KIND - GRADIENT)
        x = x.to(hp).to(tl.float32)
    elif KIND != IDENTITY:
        x = activate(x, KIND).to(hp).to(tl.float32)
        if up_ptr is not None:
            tile_ptr = up_ptr + tl.cast(first_row, tl.int64) * up_stride + first_column
            offsets = local_rows[:, None] * up_stride + local_columns[None, :]
            x *= tl.load(tile_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            x = x.to(hp).to(tl.float32)
    # What was loaded as 0 is 0 still, but where a mean or a NaN statistic reached the padding.
    if KIND == NORM or KIND == ROUNDED_NORM:  # noqa: SIM109 - Triton has no `in`
        x = tl.where(inside, x, 0.0)
    return x


PRODUCE_TILE, PRODUCE_WARPS = 64, 4


def produce(source: Producer) -> Tensor:
    """What the quantise kernels read, written: ``[R, C]`` contiguous, in the dtype of ``x``; :meth:`Producer.reference` is its definition."""
    source = source.checked()
    rows, columns = source.x.shape
    out = torch.empty((rows, columns), dtype=source.x.dtype, device=source.x.device)
    programs = tiles(rows, PRODUCE_TILE) * tiles(columns, PRODUCE_TILE)
    constants = {"KIND": source.kind, "TILE": PRODUCE_TILE, "num_warps": PRODUCE_WARPS}
    launch(_produce_kernel, programs, *source.pointers, out, rows, columns, **constants, **AS_WRITTEN)
    return out


@triton.jit
def _produce_kernel(
    x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr,
    out_ptr, R, C,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tiles_c = tl.cdiv(C, TILE)
    first_row = tl.program_id(0) // tiles_c * TILE
    first_column = tl.program_id(0) % tiles_c * TILE
    x = load_tile(
        x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr,
        first_row, first_column, R, C, KIND, TILE, TILE,
    )  # fmt: skip
    rows, columns = first_row + tl.arange(0, TILE)[:, None], first_column + tl.arange(0, TILE)[None, :]
    tl.store(
        out_ptr + rows.to(tl.int64) * C + columns,
        x.to(out_ptr.dtype.element_ty),
        mask=(rows < R) & (columns < C),
    )
