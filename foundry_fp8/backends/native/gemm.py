"""Products of quantised operands, ``a @ b.T``, without padding and with a bias.

Both operands are contiguous along what they contract, as Hopper's FP8 GEMM demands; :mod:`foundry_fp8.kernels` wrote
them so. :mod:`foundry_fp8.backends.native.products` multiplies. A compiled graph calls that as operators of this package: Inductor of
torch 2.11 fails on ``_scaled_mm`` where a scale is a view into a larger tensor, and dynamo does not trace
``torch.nn.functional.scaled_mm``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_fp8.backends.native.ops import blockwise_gemm, tensorwise_gemm
from foundry_fp8.backends.native.products import defined, tensorwise_product, without_padding
from foundry_fp8.layers.frozen_weight import in_dtype
from foundry_fp8.numerics.formats import e8m0_decode
from foundry_fp8.numerics.mx_layout import unswizzle_mx_scales

__all__ = ["blockwise_mm", "mx_mm", "tensorwise_mm"]


def tensorwise_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    m: int,
    n: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accumulation: bool = False,
    direct: bool = False,
) -> Tensor:
    """``(a @ b.T) * a_scale * b_scale + bias``, without padding.

    Args:
        a: FP8 ``[M', K]``, contiguous.
        a_scale: One float32 element, or ``[M', 1]``, one a row; what leads out of FP8.
        b: FP8 ``[N', K]``, contiguous.
        b_scale: The same for ``b``, or ``[1, N']``.
        m: Rows of the result.
        n: Columns of the result.
        out_dtype: bfloat16, float16 or float32.
        bias: ``[n]``, hp.
        fast_accumulation: Let Hopper's tensor cores accumulate in their own, shorter format.
        direct: Nothing compiles, which the caller has asked.

    Returns:
        ``[m, n]``, contiguous, ``out_dtype``.
    """
    by_row = a_scale.dim() == 2
    made = torch.bfloat16 if by_row else out_dtype  # torch's GEMM of rows writes nothing else
    inside = None if bias is None else _bias_inside(bias, b.shape[0], made)
    run = tensorwise_product if direct or not torch.compiler.is_compiling() else tensorwise_gemm
    out = without_padding(run(a, a_scale, b, b_scale, inside, made, fast_accumulation), m, n)
    if by_row:
        out = in_dtype(out, out_dtype)
    return out if bias is None or inside is not None else _with_bias(out, bias)


def blockwise_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    m: int,
    n: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    square_b: bool,
    direct: bool,
) -> Tensor:
    """``a @ b.T`` of two operands with scales of blocks of 128.

    Args are those of :func:`foundry_fp8.kernels.block_gemm.block_gemm`; ``direct``: past torch's dispatcher.
    """
    run = blockwise_gemm.direct if direct else blockwise_gemm
    y: Tensor = run(a, a_scale, b, b_scale, bias, m, n, out_dtype, square_b)
    return y


def mx_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    m: int,
    n: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """``a @ b.T`` of two MX operands; needs sm_100 and torch 2.8 with CUDA 12.8.

    Args:
        a: FP8 ``[M', K]``, contiguous, K a multiple of 32.
        a_scale: E8M0 bytes, uint8, as the block kernel writes them (:mod:`foundry_fp8.numerics.mx_layout`).
        b: FP8 ``[N', K]``, contiguous.
        b_scale: The same for ``b``.
        m: Rows of the result.
        n: Columns of the result.
        out_dtype: bfloat16, float16 or float32.
        bias: ``[n]``, hp.
    """
    inside = None
    if bias is not None and out_dtype == torch.bfloat16:
        inside = _bias_inside(bias, b.shape[0], out_dtype)
    if defined(a):
        product = _dense(a, a_scale) @ _dense(b, b_scale).t()
        out = in_dtype(product if inside is None else product + inside, out_dtype)
    else:
        product = torch._scaled_mm(
            a,
            b.t(),
            scale_a=a_scale.view(torch.float8_e8m0fnu),
            scale_b=b_scale.view(torch.float8_e8m0fnu),
            bias=inside,
            # The MX mode writes bfloat16.
            out_dtype=torch.bfloat16,
        )
        out = in_dtype(product, out_dtype)
    out = without_padding(out, m, n)
    return out if bias is None or inside is not None else _with_bias(out, bias)


def _dense(data: Tensor, codes: Tensor) -> Tensor:
    rows, columns = data.shape
    return data.float() * e8m0_decode(unswizzle_mx_scales(codes, rows, columns // 32)).repeat_interleave(
        32, 1
    )


def _bias_inside(bias: Tensor, padded_n: int, out_dtype: torch.dtype) -> Tensor | None:
    """The bias as the GEMM itself can add it: in the result's own 16-bit dtype, as long as the padded row."""
    if out_dtype == torch.float32 or bias.dtype != out_dtype:
        return None
    return bias if len(bias) == padded_n else torch.nn.functional.pad(bias, (0, padded_n - len(bias)))


# torch.compile in torch 2.11 gives zeros as the gradients of an autograd.Function whose output is one tensor with an
# intermediate result: after a write in place, or a `to` that changes nothing (pytorch issue 180642). Hence neither below.


def _with_bias(out: Tensor, bias: Tensor) -> Tensor:
    return in_dtype(out + bias, out.dtype)
