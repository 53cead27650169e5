"""FOG's attention: one GEMM for q, k and v, QK regularisation, RoPE, grouped queries, through transformers' registry."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foundry_fp8.models.fog.config import FogConfig
from foundry_fp8.models.fog.norms import ProjectionRMSNorm, RMSNorm, TanhNorm
from foundry_fp8.models.fog.rope import rotate

__all__ = ["FogAttention", "build_qk_norm", "eager_attention"]


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The definition, with the probabilities in memory.

    Args:
        module: The attention module; where its ``square_root`` is true, values are weighed by the probabilities' square roots.
        query: [b, heads, q, head_dim].
        key: [b, kv_heads, k, head_dim].
        value: [b, kv_heads, k, head_dim].
        attention_mask: Additive, broadcasts to [b, heads, q, k].
        scaling: Multiplies the logits.
        dropout: Probability of dropping a probability.

    Returns:
        Output [b, q, heads, head_dim] and probabilities [b, heads, q, k].
    """
    groups = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    # Through the logarithm, since a root has no slope at a masked 0.
    if getattr(module, "square_root", False):
        probabilities = (0.5 * logits.float().log_softmax(-1)).exp()
    else:
        probabilities = logits.float().softmax(-1)
    probabilities = F.dropout(probabilities.to(query.dtype), p=dropout, training=module.training)
    return (probabilities @ value.repeat_interleave(groups, 1)).transpose(1, 2), probabilities


class FogAttention(nn.Module):
    """``Wo DPA(R(phi(q)), R(phi(k)), v; softmax_scale)`` with ``q, k, v = Wqkv x``; phi from :mod:`.norms`, R is RoPE."""

    linear: type[nn.Linear] = nn.Linear

    def __init__(self, config: FogConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.num_key_value_groups = self.heads // self.kv_heads
        self.scaling = config.softmax_scale
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.attn_uses_sequence_id = config.sequence_ids  # LLM Foundry's word for packed documents
        width = self.heads * self.head_dim
        self.qkv_proj = self.linear(config.hidden_size, width + 2 * self.kv_heads * self.head_dim, bias=False)
        self.q_norm = build_qk_norm(config, self.heads)
        self.k_norm = build_qk_norm(config, self.kv_heads)
        self.o_proj = self.linear(width, config.hidden_size, bias=False)
        self.o_proj._is_residual = True  # type: ignore[assignment]

    def forward(
        self,
        x: Tensor,
        *,
        rope: tuple[Tensor, Tensor],
        attention_mask: Any,
        past_key_values: Cache | None = None,
        cache_position: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``x``: [b, s, hidden]. Returns the same shape, and the probabilities where the implementation has them."""
        b, s, _ = x.shape
        qkv = self.qkv_proj(x).view(b, s, -1, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx, {"cache_position": cache_position})
        implementation = self.config._attn_implementation
        attend = eager_attention if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
        dropout = self.attention_dropout if self.training else 0.0
        out, probabilities = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=dropout)
        return self.o_proj(out.reshape(b, s, -1)), probabilities


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
