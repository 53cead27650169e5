"""The gradient of the activations of :mod:`foundry_fp8.kernels.producers`, plain and gated.

The forward of an activation that feeds an FP8 GEMM never reaches memory in high precision, so there is nothing to read
back: this recomputes it from the activation's inputs, in the one pass that makes its gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.launch import as_rows, check_hp, launch
from foundry_fp8.kernels.producers import LOG2_E, Producer, activate, derivative

__all__ = ["activation_backward", "xielu_backward"]

TILE = 64
XIELU_BETA = tl.constexpr(0.5)
XIELU_EPS = tl.constexpr(-1e-6)


def activation_backward(dy: Tensor, source: Producer) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``y = activation(x) [* up]``.

    Args:
        dy: ``[R, C]``, hp.
        source: An activation's producer.

    Returns:
        Gradients of ``x`` and of ``up`` (``None`` unless gated).
    """
    check_hp("dy", dy)
    dy = as_rows(dy)
    rows, columns = source.x.shape
    dx = torch.empty((rows, columns), dtype=source.x.dtype, device=dy.device)
    dup = None if source.up is None else torch.empty_like(dx)
    tiles = triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE)
    if tiles:
        up_stride = 0 if source.up is None else source.up.stride(0)
        read = dy, dy.stride(0), source.x, source.x.stride(0), source.up, up_stride
        launch(
            _backward_kernel, tiles, *read, dx, dup, rows, columns, KIND=source.kind, TILE=TILE, num_warps=4
        )
    return dx, dup


def xielu_backward(dy: Tensor, x: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of xIELU, which is not among the producers' activations.

    Args:
        dy: ``[R, C]``, hp.
        x: ``[R, C]``, hp, the activation's input.
        slopes: float32 ``[2]``, ``(alpha_p, alpha_n)`` as they multiply.

    Returns:
        Gradients of ``x`` and of ``slopes``, the latter summed in a fixed order.

    Source:
        "Deriving activation functions using integration", arXiv:2411.13010, with beta = 0.5; as FOG uses it.
    """
    check_hp("dy", dy)
    dy, x = as_rows(dy), as_rows(x)
    rows, columns = x.shape
    dx = torch.empty((rows, columns), dtype=x.dtype, device=dy.device)
    tiles = triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE)
    partial = torch.zeros((tiles, 2), dtype=torch.float32, device=dy.device)
    if tiles:
        given = dy, dy.stride(0), x, x.stride(0), slopes, dx, partial, rows, columns
        launch(_xielu_kernel, tiles, *given, TILE=TILE, num_warps=4)
    return dx, partial.sum(0)


@triton.jit
def _backward_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, up_ptr, up_stride, dx_ptr, dup_ptr, R, C,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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
        plain = activate(x, KIND).to(hp).to(tl.float32)
        tl.store(dup_ptr + out, (dy * plain).to(hp), mask=inside)
        dy = (dy * up.to(tl.float32)).to(hp).to(tl.float32)
    tl.store(dx_ptr + out, (dy * derivative(x, KIND)).to(hp), mask=inside)


@triton.jit
def expm1(x):
    """``torch.expm1`` for x <= 0: a polynomial near 0, where ``exp(x) - 1`` cancels.

    That of degree 3 which equals ``expm1(x) / x`` at the four Chebyshev nodes of [-1/8, 0], but for 1 at 0: 3e-8 from it, half a rounding.
    """
    near = (
        tl.fma(x, tl.fma(x, tl.fma(x, 0.03964177519083023, 0.16650986671447754), 0.4999960958957672), 1.0) * x
    )
    return tl.where(x > -0.125, near, tl.exp2(x * LOG2_E) - 1.0)


@triton.jit
def _xielu_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, slopes_ptr, dx_ptr, partial_ptr, R, C, TILE: tl.constexpr
):  # fmt: skip
    pid = tl.program_id(0)
    tiles_c = tl.cdiv(C, TILE)
    rows = ((pid // tiles_c) * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (pid % tiles_c) * TILE + tl.arange(0, TILE)
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    bend = expm1(tl.minimum(x, XIELU_EPS))
    slope = tl.where(
        x > 0, 2.0 * tl.load(slopes_ptr) * x + XIELU_BETA, tl.load(slopes_ptr + 1) * bend + XIELU_BETA
    )
    out = rows[:, None] * C + columns[None, :]
    tl.store(dx_ptr + out, (dy * slope).to(dx_ptr.dtype.element_ty), mask=inside)
    positive = tl.where(inside & (x > 0), dy * x * x, 0.0)
    negative = tl.where(inside & (x <= 0), dy * (bend - x), 0.0)
    tl.store(partial_ptr + 2 * pid, tl.sum(tl.sum(positive, axis=1), axis=0))
    tl.store(partial_ptr + 2 * pid + 1, tl.sum(tl.sum(negative, axis=1), axis=0))
