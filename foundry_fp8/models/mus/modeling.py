"""The µnit-scaled decoder, as Hugging Face models: :class:`MusModel` and, with a head, :class:`MusForCausalLM`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from foundry_fp8.layers.unit_linear import UnitLinear, set_multiplier
from foundry_fp8.models.fog.attention import FogAttention
from foundry_fp8.models.fog.feedforward import MLP
from foundry_fp8.models.fog.modeling import FogForCausalLM, FogModel
from foundry_fp8.models.fog.norms import RMSNorm
from foundry_fp8.models.mus.config import MusConfig
from foundry_fp8.models.mus.residual import fixed_residual

__all__ = ["MusBlock", "MusForCausalLM", "MusModel"]


class MusAttention(FogAttention):
    """Grouped queries, RoPE and a softmax, or its square root, between µnit-scaled projections."""

    linear = UnitLinear

    def __init__(self, config: MusConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # type: ignore[arg-type]  # it has what that class reads
        self.square_root = config.square_root_softmax
        if self.square_root:
            config._attn_implementation = "eager"  # no fused kernel weighs by roots


class MusMLP(MLP):
    """``W2 act(W1 x)`` with µnit-scaled projections."""

    linear = UnitLinear


class MusBlock(nn.Module):
    """Res-Post-LayerNorm: a LayerNorm ends each branch, none begins it::

    h' = sqrt(1 - tau) h  + sqrt(tau) LN(attention(h))
    h" = sqrt(1 - tau) h' + sqrt(tau) LN(mlp(h'))
    """

    def __init__(self, config: MusConfig, layer_idx: int) -> None:
        super().__init__()
        self.tau = config.tau
        self.self_attn = MusAttention(config, layer_idx)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)
        self.mlp = MusMLP(config.hidden_size, config.intermediate_size, config.activation)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)
        set_multiplier(self, config.hidden_multiplier)

    def forward(self, hidden: Tensor, **attention: Any) -> tuple[Tensor, Tensor | None]:
        """``hidden``: [b, s, hidden]. Returns the same shape, and the attention's probabilities or ``None``."""
        branch, probabilities = self.self_attn(hidden, **attention)
        hidden = fixed_residual(hidden, self.attention_norm(branch), self.tau)
        return fixed_residual(hidden, self.mlp_norm(self.mlp(hidden)), self.tau), probabilities


class _UnitInit:
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the parameters that ``module`` owns: matrices and the table N(0, 1), gains 1."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, RMSNorm):
            module.reset_parameters()


class MusModel(_UnitInit, FogModel):
    """The input table, with multiplier 1, the blocks, and a LayerNorm, without which the stream itself grows in training."""

    config_class = MusConfig  # type: ignore[assignment]
    _no_split_modules = ["MusBlock"]  # type: ignore[assignment]  # noqa: RUF012
    block = MusBlock

    @staticmethod
    def new_norm(config: Any) -> nn.Module:
        """The norm after the last block: a LayerNorm with a gain, as at the end of each branch."""
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)


class MusForCausalLM(_UnitInit, FogForCausalLM):
    """:class:`MusModel` with a head whose output multiplier is 1/hidden_size."""

    config_class = MusConfig  # type: ignore[assignment]
    _no_split_modules = ["MusBlock"]  # type: ignore[assignment]  # noqa: RUF012
    _tied_weights_keys: dict[str, str] = {}  # noqa: RUF012
    decoder = MusModel

    def new_head(self, vocab_size: int) -> nn.Linear:
        """A head for so many tokens, not initialised."""
        width = self.config.hidden_size
        return UnitLinear(width, vocab_size, output_multiplier=1 / width)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head's weight; transformers resizes into an ``nn.Linear``, which has no multiplier."""
        if type(new_embeddings) is nn.Linear:
            weight = new_embeddings.weight
            head = self.new_head(weight.shape[0]).to(weight.device, weight.dtype)
            head.weight = weight
            new_embeddings = head
        super().set_output_embeddings(new_embeddings)


AutoConfig.register("mus", MusConfig)
AutoModel.register(MusConfig, MusModel)
AutoModelForCausalLM.register(MusConfig, MusForCausalLM)
