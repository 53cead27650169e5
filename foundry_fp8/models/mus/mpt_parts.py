"""µnit Scaling's parts for MPT, through LLM Foundry's layer registries.

MPT's block is ``x + attn(norm_1(x))``, then ``x + ffn(norm_2(x))``. With ``norm_type: mus_norm`` a branch is given x itself,
so that the part at its end can return what makes the block's plain sum the fixed(tau) residual; a LayerNorm ends the model. The keys of the
YAML are in docs/unit_scaling.md; the algorithm ``unit_scaling`` checks that they are all there.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from llmfoundry.models.layers.attention import GroupedQueryAttention
from llmfoundry.models.layers.ffn import resolve_ffn_hidden_size
from llmfoundry.models.utils.param_init_fns import generic_param_init_fn_
from torch import Tensor, nn

from foundry_fp8.config import ConfigError, Positive, PositiveNumber, accept, check_arguments
from foundry_fp8.layers.unit_linear import set_multiplier
from foundry_fp8.models.mus.modeling import MusMLP
from foundry_fp8.models.mus.residual import Tau, branch_for_plain_residual

__all__ = ["MusMPTAttention", "MusMPTFFN", "MusMPTNorm", "build_mus_ffn", "unit_normal_"]


class MusMPTNorm(nn.LayerNorm):
    """``norm_type: mus_norm``: a LayerNorm after the last block, with a gain and no bias, and the identity within blocks.

    MPT builds all its norms alike. Then it writes ``block_idx`` into the modules of its blocks, and ``norm_f`` is none of them.
    """

    def __init__(self, normalized_shape: int, eps: PositiveNumber = 1e-5, device: str | None = None) -> None:
        accept(PositiveNumber, eps, "model.norm_eps")
        super().__init__(normalized_shape, eps=eps, device=device, bias=False)

    @property
    def block_idx(self) -> int:
        """The block that it lies in; none has the final norm."""
        return self._block_idx

    @block_idx.setter
    def block_idx(self, index: int) -> None:
        self._block_idx = index
        self.elementwise_affine = False
        self.register_parameter("weight", None)

    def forward(self, input: Tensor) -> Tensor:
        """``input``: [..., width]. Returns the same shape."""
        return super().forward(input) if self.elementwise_affine else input


class MusMPTAttention(GroupedQueryAttention):
    """MPT's grouped-query attention, ended by a LayerNorm and the fixed(tau) residual's branch.

    Args:
        d_model: Width.
        n_heads: Query heads.
        tau: The share of the branch in the variance of the residual stream.
        kv_n_heads: Key and value heads. Default: ``n_heads``.
        norm_eps: Epsilon of the LayerNorm.
        device: Where to create parameters.
        kwargs: As for ``grouped_query_attention``.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        tau: Tau,
        kv_n_heads: Positive | None = None,
        norm_eps: PositiveNumber = 1e-5,
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_arguments(MusMPTAttention, locals(), "model.attn_config")
        _check_linears(
            kwargs.get("bias", False), kwargs.get("fc_type"), "attn_config.attn_type: mus_attention"
        )
        super().__init__(
            d_model=d_model,
            n_heads=n_heads,
            kv_n_heads=kv_n_heads or n_heads,
            norm_eps=norm_eps,
            device=device,
            **kwargs,
        )
        self.tau = float(tau)
        self.post_norm = nn.LayerNorm(d_model, eps=norm_eps, device=device, bias=False)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``x``: [b, s, d_model], the residual stream itself."""
        out, probabilities, past_key_value = super().forward(x, *args, **kwargs)
        return branch_for_plain_residual(x, self.post_norm(out), self.tau), probabilities, past_key_value


class MusMPTFFN(MusMLP):
    """``W2 act(W1 x)``, ended by a LayerNorm and the fixed(tau) residual's branch."""

    def __init__(self, d_model: int, hidden: int, act: Any, tau: float, norm_eps: float) -> None:
        super().__init__(d_model, hidden, act)
        self.tau = float(tau)
        self.post_norm = nn.LayerNorm(d_model, eps=norm_eps, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [..., d_model], the residual stream itself. Returns the same shape."""
        return branch_for_plain_residual(x, self.post_norm(super().forward(x)), self.tau)


def build_mus_ffn(
    d_model: int,
    expansion_ratio: PositiveNumber,
    tau: Tau,
    fc_type: dict[str, Any] | None = None,
    ffn_hidden_size: Positive | None = None,
    ffn_act: Literal["gelu", "silu", "relu"] = "gelu",
    norm_eps: PositiveNumber = 1e-5,
    device: str | None = None,
    bias: bool = False,
) -> nn.Module:
    """``ffn_type: mus_ffn``. Arguments as LLM Foundry's ``mptmlp``, and ``tau``."""
    given = locals()
    check_arguments(build_mus_ffn, {"expansion_ratio": given.pop("expansion_ratio")}, "model")
    check_arguments(build_mus_ffn, given, "model.ffn_config")
    _check_linears(bias, fc_type, "ffn_config.ffn_type: mus_ffn")
    hidden = resolve_ffn_hidden_size(d_model, expansion_ratio, ffn_hidden_size)
    with nullcontext() if device is None else torch.device(device):
        ffn = MusMPTFFN(d_model, hidden, ffn_act, tau, norm_eps)
    set_multiplier(ffn, (fc_type or {}).get("output_multiplier"))
    return ffn


def _check_linears(bias: bool, fc_type: dict[str, Any] | None, part: str) -> None:
    if bias or (fc_type is not None and fc_type.get("name") != "unit"):
        raise ConfigError(f"model.{part} needs model.no_bias: true and model.fc_type: {{name: unit}}.")


def unit_normal_(module: nn.Module, n_layers: int, d_model: int | None = None, **_: Any) -> None:
    """``init_config: {name: unit_normal_}``: matrices and the input table N(0, 1), gains 1, whatever lies on a branch."""
    generic_param_init_fn_(
        module=module,
        init_fn_=nn.init.normal_,
        n_layers=n_layers,
        d_model=d_model,
        init_div_is_residual=False,
    )
