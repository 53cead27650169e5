"""Definitions in torch of kernels whose bits nothing in the package compares."""

import torch
from torch import Tensor

from foundry_fp8.kernels.block_gemm import GROUP
from foundry_fp8.kernels.producers import Producer


def norm_statistics_reference(x: Tensor, eps: float, *, centered: bool) -> tuple[Tensor | None, Tensor]:
    """The torch expression of :func:`norm_statistics`."""
    x = x.float()
    mean = x.mean(1) if centered else None
    deviation = x if mean is None else x - mean[:, None]
    return mean, 1.0 / torch.sqrt(deviation.square().mean(1) + eps)


def norm_backward_reference(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, *, mean: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The torch expression of :func:`norm_backward`."""
    dy32, x32 = dy.float(), x.float()
    normalized = (x32 if mean is None else x32 - mean[:, None]) * rstd[:, None]
    g = dy32 if weight is None else dy32 * weight.float()
    dx = g - normalized * (g * normalized).mean(1, keepdim=True)
    if mean is not None:
        dx = dx - g.mean(1, keepdim=True)
    dbias = dy32.new_empty(0) if mean is None else dy32.sum(0)
    return (dx * rstd[:, None]).to(x.dtype), (dy32 * normalized).sum(0), dbias


def activation_backward_reference(dy: Tensor, source: Producer) -> tuple[Tensor, Tensor | None]:
    """The definition of :func:`activation_backward`: autograd of :meth:`Producer.reference`, with its roundings."""
    hp = source.x.dtype
    x = source.x.detach().float().requires_grad_()
    with torch.enable_grad():
        plain = source._replace(x=x, up=None).reference()
    if source.up is None:
        dplain, dup = dy.float(), None
    else:
        dplain, dup = (dy * source.up).float(), dy * plain.detach().to(hp)
    return torch.autograd.grad(plain, x, dplain)[0].to(hp), dup


def block_gemm_reference(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    m: int,
    n: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    square_b: bool = False,
) -> Tensor:
    """The torch expression that :func:`block_gemm` computes, in float64 (the kernel accumulates in float32)."""

    def dense(data: Tensor, scale: Tensor) -> Tensor:
        per_element = scale.repeat_interleave(GROUP, 1)[:, : data.shape[1]]
        if per_element.shape[0] != data.shape[0]:
            per_element = per_element.repeat_interleave(GROUP, 0)[: data.shape[0]]
        return data.double() * per_element.double()

    out = (dense(a, a_scale.t()) @ dense(b, b_scale if square_b else b_scale.t()).t())[:m, :n]
    return (out if bias is None else out + bias.double()).to(out_dtype)
