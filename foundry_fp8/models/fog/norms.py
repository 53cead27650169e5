"""Norms and gains: RMSNorm wherever a block has one, LayerScale where it has none, and what bounds the attention logits.

The last are applied to q and k by head, before RoPE: with RMSNorm or TanhNorm ``|q . k| <= head_dim`` (RoPE keeps norms), so that
``|logit| <= softmax_scale * head_dim``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["LayerScale", "ProjectionRMSNorm", "RMSNorm", "TanhNorm"]


class RMSNorm(nn.Module):
    """``y = gain * x / sqrt(mean(x^2) + eps)`` over the last dimension, computed in float32.

    As a post-norm FOG starts its gain at 1/sqrt(layers); a frozen gain is the constant ``gain``, without a parameter.

    Args:
        size: Elements of the last dimension.
        eps: Added to the mean square.
        gain: Initial (or constant) gain.
        trainable: Whether the gain is a parameter, a vector of ``size``.
        device: Where to create the parameter.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float = 1e-5,
        gain: float = 1.0,
        trainable: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.size, self.eps, self.gain = size, eps, gain
        self.weight = nn.Parameter(torch.empty(size, device=device)) if trainable else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gain to its initial value (also after materialising from the meta device)."""
        if self.weight is not None:
            nn.init.constant_(self.weight, self.gain)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [..., size], hp. Returns the same shape and dtype."""
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (y * (self.gain if self.weight is None else self.weight.float())).to(x.dtype)

    def extra_repr(self) -> str:
        """Size, epsilon, gain and whether it trains."""
        return f"{self.size}, eps={self.eps}, gain={self.gain:.4g}, trainable={self.weight is not None}"


class LayerScale(nn.Module):
    """``y = gain * x`` with a trainable gain vector: what OP has on a branch in place of a norm (He et al., 2405.19279)."""

    def __init__(self, size: int, *, gain: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.size, self.gain = size, gain
        self.weight = nn.Parameter(torch.empty(size, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gain to its initial value."""
        nn.init.constant_(self.weight, self.gain)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [..., size], hp. Returns the same shape and dtype."""
        return x * self.weight.to(x.dtype)

    def extra_repr(self) -> str:
        """Size and initial gain."""
        return f"{self.size}, gain={self.gain:.4g}"


class TanhNorm(nn.Module):
    """``y = tanh(alpha x)``, elementwise; alpha is one scalar for all heads (a dynamic tanh without gain and bias)."""

    def __init__(
        self, *, alpha: float = 1.0, trainable: bool = True, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.initial_alpha = alpha
        # One element rather than none: FSDP shards dimensions, and a scalar has none.
        self.alpha = nn.Parameter(torch.empty(1, device=device)) if trainable else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set alpha to its initial value."""
        if self.alpha is not None:
            nn.init.constant_(self.alpha, self.initial_alpha)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: any shape, hp. Returns the same shape and dtype, in [-1, 1]."""
        alpha = self.initial_alpha if self.alpha is None else self.alpha.float()
        return torch.tanh(alpha * x.float()).to(x.dtype)

    def extra_repr(self) -> str:
        """Initial alpha and whether it trains."""
        return f"alpha={self.initial_alpha}, trainable={self.alpha is not None}"


class ProjectionRMSNorm(RMSNorm):
    """RMSNorm over all heads of the projection together, as the original OLMo2 has it."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [b, s, heads, head_dim]."""
        return super().forward(x.flatten(-2)).view(x.shape)
