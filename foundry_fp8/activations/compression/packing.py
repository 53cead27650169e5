"""Saved tensors in 8 or 4 bits: one scale a block of elements that lie next to each other in memory.

The reference, in plain torch, for every device. On CUDA the Triton kernels of
:mod:`foundry_fp8.kernels.packing` run instead and are tested for equality with this file.

=======  ==========  =====  =======================  ==============================================
format   bytes/elt   block  code                     relative error (RMS, Gaussian input)
=======  ==========  =====  =======================  ==============================================
int8     1.031       128    round(x * 127 / amax)    6.5e-3
e4m3     1.031       128    E4M3(x * 448 / amax)     2.6e-2
int4     0.5625      32     round(x * 7 / amax)      9.7e-2
=======  ==========  =====  =======================  ==============================================

The integer formats round the smallest elements to zero. Where backward tests for zero (relu's output: without this the
gradient was 10 % wrong), ``nonzero=True`` gives them the smallest code instead. Elsewhere that adds a bias: in a peaked
softmax the many small probabilities would sum to too much (the gradient of the scores was twice too large).

A block that holds an Inf or a NaN unpacks to NaN throughout, so that gradient clipping still sees an overflow.

Source:
    Group-wise E4M3 of activations: COAT (arXiv:2410.19313), which groups 16 elements; here 128, as at equal bytes the
    scales of small groups cost more than they gain. The errors are this package's (``tests/activations``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foundry_fp8.compat.fake_tensor import FakeTensor
from foundry_fp8.numerics.packed import MIN_AMAX, Packed, PackFormat

__all__ = ["pack", "packable", "unpack"]

PART = 2**19
"""Elements that the reference rounds at a time, so that they and the temporaries stay in a CPU's cache."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def packable(x: Tensor) -> bool:
    """Whether :func:`pack` takes this tensor: plain, float32, bfloat16 or float16."""
    plain = type(x) in (Tensor, torch.nn.Parameter, FakeTensor)
    return plain and x.layout == torch.strided and x.dtype in _DTYPES


def pack(x: Tensor, fmt: PackFormat, *, row: int | None = None, nonzero: bool = False) -> Packed:
    """Pack a tensor, read in logical order.

    Args:
        x: Any shape, float32, bfloat16 or float16 (:func:`packable`).
        fmt: The format. Its block is made smaller where it does not divide a row (:meth:`PackFormat.within`).
        row: Elements of a row, where it is not the last dimension of ``x``.
        nonzero: ``x`` has no negative elements, and positive ones must not become 0 (int8, int4; E4M3 represents
            values down to 1/458752 of the amax).

    Returns:
        The packed tensor. It holds no reference to ``x``.
    """
    flat = x.detach().reshape(-1)
    fmt = fmt.within(row or (x.shape[-1] if x.dim() else 1))
    if isinstance(flat, FakeTensor):  # a dry run: what the kernels allocate
        blocks = -(-flat.numel() // fmt.block)
        codes = flat.new_empty((blocks, fmt.code_bytes), dtype=torch.uint8)
        scale_inv = codes.new_empty(blocks * fmt.scale_dtype.itemsize)
    elif flat.is_cuda:
        from foundry_fp8.kernels.packing import quantize_blocks

        codes, scale_inv = quantize_blocks(flat, fmt, nonzero=nonzero)
    else:
        codes, scale_inv = quantize_blocks_reference(flat, fmt, nonzero=nonzero)
    return Packed(codes, scale_inv, fmt, flat.numel(), x.dtype)


def unpack(packed: Packed) -> Tensor:
    """The values, 1-d ``[numel]``, in the dtype that was packed."""
    if isinstance(packed.codes, FakeTensor):
        return packed.codes.new_empty(packed.numel, dtype=packed.dtype)
    if packed.codes.is_cuda:
        from foundry_fp8.kernels.packing import dequantize_blocks

        return dequantize_blocks(packed)
    return dequantize_blocks_reference(packed)


def quantize_blocks_reference(
    flat: Tensor, fmt: PackFormat, *, nonzero: bool = False
) -> tuple[Tensor, Tensor]:
    """``(codes, scale_inv)`` of :class:`Packed` for a 1-d tensor; ``nonzero`` as in :func:`pack`."""
    padding = -flat.numel() % fmt.block
    blocks = (torch.nn.functional.pad(flat, (0, padding)) if padding else flat).view(-1, fmt.block)
    # amin and amax are vectorised on a CPU, where a norm or aminmax along a dimension takes forty times as long.
    amax = torch.maximum(blocks.amax(1), blocks.amin(1).neg_()).float().clamp_min_(MIN_AMAX)
    scale_inv = (amax * (1.0 / fmt.code_max)).to(fmt.scale_dtype)
    # int4 rounds its scale, so codes are made with the scale that will be read; the others keep full precision.
    # A division, as in the kernels; torch would turn number / tensor into a reciprocal and a product.
    int4 = fmt.name == "int4"
    scale = torch.div(amax.new_full((), 1.0 if int4 else fmt.code_max), scale_inv.float() if int4 else amax)
    # Checked once for all blocks: on a CPU every small operation costs as much as a pass over a tensor.
    finite = None
    if amax.numel() > 0 and not math.isfinite(amax.max()):
        finite = amax.isfinite()
        scale_inv = torch.where(finite, scale_inv, torch.nan)
    codes = torch.empty((len(blocks), fmt.code_bytes), dtype=torch.uint8, device=flat.device)
    rows = max(PART // fmt.block, 1)
    for part in (slice(i, i + rows) for i in range(0, len(blocks), rows)):
        scaled = blocks[part] * scale[part].unsqueeze(1)
        if finite is not None:  # a block that is not finite becomes NaN by its scale, whatever its codes
            scaled = torch.where(finite[part].unsqueeze(1), scaled, 0.0)
        if nonzero and fmt.name != "e4m3":
            torch.maximum(scaled, scaled.sign(), out=scaled)
        _encode(scaled, fmt, codes[part])
    return codes, scale_inv.view(torch.uint8)


def _encode(scaled: Tensor, fmt: PackFormat, codes: Tensor) -> None:
    if fmt.name == "e4m3":
        codes.view(torch.float8_e4m3fn).copy_(scaled.clamp_(-448.0, 448.0))
    elif fmt.name == "int8":
        codes.view(torch.int8).copy_(scaled.round_())
    else:
        nibbles = scaled.round_().clamp_(-7.0, 7.0).add_(8.0).to(torch.uint8).view(-1, fmt.block // 2, 2)
        torch.bitwise_or(nibbles[..., 0], nibbles[..., 1] << 4, out=codes)


def dequantize_blocks_reference(packed: Packed) -> Tensor:
    """See :func:`unpack`."""
    fmt = packed.fmt
    if fmt.name == "int4":
        low, high = (packed.codes & 15), (packed.codes >> 4)
        codes = torch.stack((low, high), dim=-1).view(-1, fmt.block).float().sub_(8.0)
    elif fmt.name == "int8":
        codes = packed.codes.view(torch.int8).float()
    else:
        codes = packed.codes.view(torch.float8_e4m3fn).float()
    return codes.mul_(packed.scales.unsqueeze(1)).view(-1)[: packed.numel].to(packed.dtype)
