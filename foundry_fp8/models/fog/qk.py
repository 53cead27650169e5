"""QK regularisation: what bounds the attention logits, applied to q and k by head, before RoPE.

With either part ``|q . k| <= head_dim`` (RoPE keeps norms), so that ``|logit| <= softmax_scale * head_dim``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foundry_fp8.models.fog.config import FogConfig
from foundry_fp8.models.fog.norms import RMSNorm

__all__ = ["ProjectionRMSNorm", "TanhNorm", "build_qk_norm"]


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


def build_qk_norm(config: FogConfig, heads: int) -> nn.Module:
    """The part that the configuration names, for q (``heads`` query heads) or k; maps [b, s, heads, head_dim] to itself."""
    if config.qk_norm == "none":
        return nn.Identity()
    if config.qk_norm == "tanh":
        return TanhNorm(alpha=config.tanh_alpha_init, trainable=config.tanh_alpha_trainable)
    trainable = config.qk_gain == "trainable"
    if config.qk_norm_over == "projection":
        return ProjectionRMSNorm(heads * config.head_dim, eps=config.norm_eps, trainable=trainable)
    return RMSNorm(config.head_dim, eps=config.norm_eps, trainable=trainable)
