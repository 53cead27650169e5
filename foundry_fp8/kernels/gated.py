"""The gradient of the activations of :mod:`foundry_fp8.kernels.producers`, plain and gated.

The forward of an activation that feeds an FP8 GEMM never reaches memory in high precision, so there is nothing to read
back: this recomputes it from the activation's inputs, in the one pass that makes its gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.launch import as_rows, check_hp, launch
from foundry_fp8.kernels.producers import (
    XIELU,
    XIELU_EPS,
    Producer,
    activate,
    derivative,
    expm1,
)

__all__ = ["activation_backward"]

TILE = 64


def activation_backward(dy: Tensor, source: Producer) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``y = activation(x) [* up]``.

    Args:
        dy: ``[R, C]``, hp.
        source: An activation's producer.

    Returns:
        Gradients of ``x``, of ``up`` (``None`` unless gated), and of xIELU's ``alpha`` (float32 ``[2]``, summed in a fixed
        order; ``None`` for the others).
    """
    check_hp("dy", dy)
    dy = as_rows(dy)
    rows, columns = source.x.shape
    dx = torch.empty((rows, columns), dtype=source.x.dtype, device=dy.device)
    dup = None if source.up is None else torch.empty_like(dx)
    tiles = triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE)
    partial = None
    if source.alpha is not None:
        partial = torch.zeros((tiles, 2), dtype=torch.float32, device=dy.device)
    if tiles:
        up_stride = 0 if source.up is None else source.up.stride(0)
        launch(
            _backward_kernel,
            tiles,
            dy,
            dy.stride(0),
            source.x,
            source.x.stride(0),
            source.up,
            up_stride,
            source.alpha,
            dx,
            dup,
            partial,
            rows,
            columns,
            KIND=source.kind,
            TILE=TILE,
            num_warps=4,
        )
    return dx, dup, None if partial is None else partial.sum(0)


@triton.jit
def _backward_kernel(
    dy_ptr,
    dy_stride,
    x_ptr,
    x_stride,
    up_ptr,
    up_stride,
    alpha_ptr,
    dx_ptr,
    dup_ptr,
    partial_ptr,
    R,
    C,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles_c = tl.cdiv(C, TILE)
    rows = ((pid // tiles_c) * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (pid % tiles_c) * TILE + tl.arange(0, TILE)
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    hp = dx_ptr.dtype.element_ty
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    out = rows[:, None] * C + columns[None, :]
    if up_ptr is not None:
        up = tl.load(up_ptr + rows[:, None] * up_stride + columns[None, :], mask=inside, other=0.0)
        plain = activate(x, alpha_ptr, KIND).to(hp).to(tl.float32)
        tl.store(dup_ptr + out, (dy * plain).to(hp), mask=inside)
        dy = (dy * up.to(tl.float32)).to(hp).to(tl.float32)
    tl.store(dx_ptr + out, (dy * derivative(x, alpha_ptr, KIND)).to(hp), mask=inside)
    if KIND == XIELU:
        positive = tl.where(inside & (x > 0), dy * x * x, 0.0)
        negative = tl.where(inside & (x <= 0), dy * (expm1(tl.minimum(x, XIELU_EPS)) - x), 0.0)
        tl.store(partial_ptr + 2 * pid, tl.sum(tl.sum(positive, axis=1), axis=0))
        tl.store(partial_ptr + 2 * pid + 1, tl.sum(tl.sum(negative, axis=1), axis=0))
