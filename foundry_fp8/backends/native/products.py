"""What multiplies, ``a @ b.T``: ``torch._scaled_mm``; for blocks of 128 torch's own GEMM or Triton's.

Both operands are contiguous along what they contract, as Hopper's FP8 GEMM demands; :mod:`foundry_fp8.kernels` wrote
them so. A compiled graph calls these as operators of this package (but MX): Inductor of torch 2.11 fails on ``_scaled_mm`` where a scale is a
view into a larger tensor, and dynamo does not trace ``torch.nn.functional.scaled_mm``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_fp8.compat.block_scaled_mm import block_mode_missing, block_scaled_mm, fits_block_mode
from foundry_fp8.compat.fake_tensor import dry_run
from foundry_fp8.kernels.block_gemm import block_gemm
from foundry_fp8.layers.frozen_weight import in_dtype
from foundry_fp8.numerics.formats import e8m0_decode
from foundry_fp8.numerics.mx_layout import unswizzle_mx_scales

__all__ = ["blockwise_gemm", "defined", "mx_product", "mx_scales", "tensorwise_gemm", "without_padding"]


def tensorwise_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """``(a @ b.T) * a_scale * b_scale + bias`` as it is padded, ``[M', N']``."""
    if defined(a):
        product = (a.float() @ b.float().t()) * (a_scale * b_scale)
        return in_dtype(product if bias is None else product + bias, out_dtype)
    return torch._scaled_mm(
        a,
        b.t(),
        scale_a=a_scale,
        scale_b=b_scale,
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )


def blockwise_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    m: int,
    n: int,
    out_dtype: torch.dtype,
    square_b: bool,
) -> Tensor:
    """``a @ b.T``, ``[m, n]``, by torch's own GEMM where there is one, otherwise by Triton's. Both promote to float32 after every 128 products."""
    if (
        bias is None  # which Triton's adds before it rounds
        and a.is_cuda
        and block_mode_missing(a.get_device()) is None
        and fits_block_mode(b.shape[0], b.shape[1], out_dtype, square_b=square_b)
    ):
        return without_padding(block_scaled_mm(a, a_scale, b, b_scale, out_dtype, square_b=square_b), m, n)
    return block_gemm(a, a_scale, b, b_scale, m=m, n=n, out_dtype=out_dtype, bias=bias, square_b=square_b)


def mx_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None) -> Tensor:
    """``a @ b.T + bias`` as it is padded, ``[M', N']``, bfloat16 (where :func:`defined`: float32).

    Args:
        a: FP8 ``[M', K]``, contiguous, K a multiple of 32.
        a_scale: E8M0 bytes, uint8, as the block kernel writes them (:mod:`foundry_fp8.numerics.mx_layout`).
        b: FP8 ``[N', K]``, contiguous.
        b_scale: The same for ``b``.
        bias: ``[N']``, bfloat16.
    """
    if defined(a):
        product = (a.float() * mx_scales(a, a_scale)) @ (b.float() * mx_scales(b, b_scale)).t()
        return product if bias is None else product + bias
    return torch._scaled_mm(
        a,
        b.t(),
        scale_a=a_scale.view(torch.float8_e8m0fnu),
        scale_b=b_scale.view(torch.float8_e8m0fnu),
        bias=bias,
        out_dtype=torch.bfloat16,  # the MX mode writes nothing else
    )


def mx_scales(data: Tensor, codes: Tensor) -> Tensor:
    """float32, of the shape of ``data``: what each element of an MX operand is multiplied by."""
    rows, columns = data.shape
    return e8m0_decode(unswizzle_mx_scales(codes, rows, columns // 32)).repeat_interleave(32, 1)


def defined(a: Tensor) -> bool:
    """Whether the definition runs in place of a GEMM: under Triton's interpreter, which takes tensors of a CPU. A dry run has the GEMM."""
    return a.device.type == "cpu" and not dry_run()


def without_padding(out: Tensor, m: int, n: int) -> Tensor:
    """The first ``m`` rows and ``n`` columns, contiguous."""
    if out.shape[0] != m:
        out = out.narrow(0, 0, m)
    return out if out.shape[1] == n else out.narrow(1, 0, n).clone(memory_format=torch.contiguous_format)
