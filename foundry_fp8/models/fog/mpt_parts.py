"""FOG's parts for MPT, through LLM Foundry's layer registries.

MPT's block is ``x + attn(norm_1(x))``, then ``x + ffn(norm_2(x))``. FOG's post-norm sits at the end of the branch, so it
lives inside the attention class and the MLP here, and MPT's own norms become ``norm_type: no_norm`` (the YAML: docs/fog.md).
``post_norm_gain`` is 1/sqrt(n_layers) in FOG; a block cannot know n_layers, so it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from llmfoundry.models.layers.attention import GroupedQueryAttention
from llmfoundry.models.layers.ffn import resolve_ffn_hidden_size
from llmfoundry.models.layers.layer_builders import build_fc
from torch import Tensor, nn

from foundry_fp8.config import Positive, PositiveNumber, accept, check_arguments
from foundry_fp8.models.fog.feedforward import XIELU, smooth_swiglu_fog
from foundry_fp8.models.fog.norms import RMSNorm, TanhNorm

__all__ = ["FogMPTAttention", "NoNorm", "build_fog_ffn", "build_smooth_swiglu_ffn", "init_fog_module"]


class NoNorm(nn.Identity):
    """An identity with a norm's signature: FOG's blocks have no pre-norm and no final norm."""

    def __init__(self, normalized_shape: int, eps: float | None = 1e-5, device: str | None = None) -> None:
        super().__init__()
        accept(PositiveNumber | None, eps, "model.norm_eps")


class FogMPTAttention(GroupedQueryAttention):
    """MPT's grouped-query attention with QK regularisation by head and a post-norm.

    Args:
        d_model: Width.
        n_heads: Query heads.
        kv_n_heads: Key and value heads. Default: ``n_heads``.
        qk_norm: ``rms`` (without a gain), ``tanh`` or ``none``.
        tanh_alpha_init: Initial alpha of ``tanh``.
        post_norm_gain: Initial gain of the RMSNorm on the output; ``None`` for no post-norm.
        norm_eps: Epsilon of the norms.
        device: Where to create parameters.
        kwargs: As for ``grouped_query_attention``.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        kv_n_heads: Positive | None = None,
        qk_norm: Literal["rms", "tanh", "none"] = "rms",
        tanh_alpha_init: PositiveNumber = 1.0,
        post_norm_gain: PositiveNumber | None = None,
        norm_eps: PositiveNumber = 1e-5,
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_arguments(FogMPTAttention, locals(), "model.attn_config")
        super().__init__(
            d_model=d_model,
            n_heads=n_heads,
            kv_n_heads=kv_n_heads or n_heads,
            norm_eps=norm_eps,
            device=device,
            **kwargs,
        )
        self.q_norm, self.k_norm = (
            _qk_norm(qk_norm, self.head_dim, norm_eps, tanh_alpha_init, device) for _ in "qk"
        )
        self.post_norm = _post_norm(d_model, post_norm_gain, norm_eps, device)

    def get_qkv(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """MPT's projections, then the regularisation of q and k."""
        q, k, v = super().get_qkv(*args, **kwargs)
        shapes = q.shape, k.shape
        q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).view(shapes[0])
        k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).view(shapes[1])
        return q, k, v

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """MPT's attention, then the post-norm."""
        out, probabilities, past_key_value = super().forward(*args, **kwargs)
        return self.post_norm(out), probabilities, past_key_value


class FogMPTFFN(nn.Module):
    """``post_norm(down(act(up(x))))``; the smooth gated form where ``act`` is ``None``. Arguments as of :func:`build_fog_ffn`."""

    def __init__(
        self,
        act: nn.Module | None,
        d_model: int,
        expansion_ratio: float,
        fc_type: dict[str, Any] | None,
        ffn_hidden_size: int | None,
        post_norm_gain: float | None,
        norm_eps: float,
        device: str | None,
        bias: bool,
    ) -> None:
        super().__init__()
        hidden = resolve_ffn_hidden_size(d_model, expansion_ratio, ffn_hidden_size)
        fc_type = fc_type or {"name": "torch", "bias": bias, "device": device}
        kwargs = {"name": fc_type["name"], "fc_kwargs": fc_type}
        self.up_proj = build_fc(in_features=d_model, out_features=hidden, **kwargs)
        self.gate_proj = build_fc(in_features=d_model, out_features=hidden, **kwargs) if act is None else None
        self.down_proj = build_fc(in_features=hidden, out_features=d_model, **kwargs)
        self.down_proj._is_residual = True
        self.act = act
        self.post_norm = _post_norm(d_model, post_norm_gain, norm_eps, device)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [..., d_model]. Returns the same shape."""
        up = self.up_proj(x)
        if self.act is not None:
            return self.post_norm(self.down_proj(self.act(up)))
        assert self.gate_proj is not None
        h, per_token = smooth_swiglu_fog(self.gate_proj(x), up)
        return self.post_norm(self.down_proj(h) * per_token)


def build_fog_ffn(
    d_model: int,
    expansion_ratio: PositiveNumber,
    fc_type: dict[str, Any] | None = None,
    ffn_hidden_size: Positive | None = None,
    ffn_act: Literal["xielu", "gelu", "relu"] = "xielu",
    post_norm_gain: PositiveNumber | None = None,
    norm_eps: PositiveNumber = 1e-5,
    device: str | None = None,
    bias: bool = False,
) -> nn.Module:
    """``ffn_type: fog_ffn``: xIELU or GELU, and an optional post-norm. Arguments as LLM Foundry's ``mptmlp``."""
    given = locals()
    act = XIELU(device=device) if ffn_act == "xielu" else nn.GELU() if ffn_act == "gelu" else nn.ReLU()
    return _ffn(build_fog_ffn, act, given)


def build_smooth_swiglu_ffn(
    d_model: int,
    expansion_ratio: PositiveNumber,
    fc_type: dict[str, Any] | None = None,
    ffn_hidden_size: Positive | None = None,
    post_norm_gain: PositiveNumber | None = None,
    norm_eps: PositiveNumber = 1e-5,
    device: str | None = None,
    bias: bool = False,
) -> nn.Module:
    """``ffn_type: smooth_swiglu``: the gated MLP with FOG's baseline's per-token scale, see ``smooth_swiglu_fog``."""
    return _ffn(build_smooth_swiglu_ffn, None, locals())


def _ffn(builder: Callable[..., nn.Module], act: nn.Module | None, given: dict[str, Any]) -> nn.Module:
    check_arguments(builder, {"expansion_ratio": given["expansion_ratio"]}, "model")
    check_arguments(builder, {k: v for k, v in given.items() if k != "expansion_ratio"}, "model.ffn_config")
    return FogMPTFFN(act, **{name: value for name, value in given.items() if name != "ffn_act"})


def init_fog_module(module: nn.Module, **_: Any) -> bool:
    """Initialise the parts that no initialisation of LLM Foundry knows (``module_init_fns``); true where it did."""
    if isinstance(module, RMSNorm | TanhNorm | XIELU):
        module.reset_parameters()
        return True
    return False


def _qk_norm(kind: str, head_dim: int, eps: float, alpha: float, device: str | None) -> nn.Module:
    if kind == "rms":
        return RMSNorm(head_dim, eps=eps, trainable=False, device=device)
    return TanhNorm(alpha=alpha, device=device) if kind == "tanh" else nn.Identity()


def _post_norm(size: int, gain: float | None, eps: float, device: torch.device | str | None) -> nn.Module:
    return nn.Identity() if gain is None else RMSNorm(size, eps=eps, gain=gain, device=device)
