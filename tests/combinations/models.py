"""Tiny causal models: Hugging Face's Llama, one of torch's own modules, one that looks like others but is not, one µnit-scaled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 32
LENGTH = 24
WIDTH = 32


def llama(tied: bool, intermediate: int = 3 * WIDTH) -> nn.Module:
    """Query, key and value read one tensor, and so do gate and up; grouped heads; no biases."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        use_cache=False,
        tie_word_embeddings=tied,
        initializer_range=0.15,
    )
    return HuggingFace(LlamaForCausalLM(config))


def unit_scaled(tied: bool) -> nn.Module:
    """Of twice the width that its learning rate is said to be for."""
    from foundry_fp8.models.mus import MusConfig, MusForCausalLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB}
    return HuggingFace(MusForCausalLM(MusConfig(**sizes, tie_word_embeddings=tied)))


class HuggingFace(nn.Module):
    """Logits of a model that returns more."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Odd sizes: neither 50 nor what four ranks get of it is a multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 50)
        self.down = nn.Linear(50, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module], mlp: type[nn.Module], bias: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(WIDTH), norm(WIDTH)
        self.attention = Attention(bias)
        self.mlp = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    def __init__(self, tied: bool, norm: type[nn.Module], mlp: type[nn.Module], bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(norm, mlp, bias) for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor([1.0, 0.01]))  # two elements, of sizes far apart
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale[0] + self.scale[1]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RMSNorm(nn.Module):
    """By name one of torch's or Llama's; what it computes is Gemma's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class OddMLP(nn.Module):
    """Functions whose backward asks for the sign, the inverse or the root of what they kept."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 64)
        self.gate = nn.Linear(WIDTH, 64, bias=False)
        self.down = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        left, right = up.chunk(2, dim=-1)
        left = F.leaky_relu(left, 0.1).clamp(-1.5)
        right = right.abs().add(0.5).sqrt().reciprocal() * 0.3
        gate = self.gate(x).add_(0.1).relu_()
        return self.down(torch.cat([left, right], dim=-1) * gate)


MODELS = {
    "llama": llama,
    "wide": lambda tied: llama(tied, 512),  # a quarter of an MLP's matrix has 4096 elements
    "mus": unit_scaled,
    "plain": lambda tied: Decoder(tied, nn.LayerNorm, MLP, bias=True),
    "odd": lambda tied: Decoder(tied, RMSNorm, OddMLP, bias=False),
}


def build(name: str, *, tied: bool) -> nn.Module:
    """A model of :data:`MODELS`, alike on every rank, with every parameter away from its special values."""
    torch.manual_seed(1)
    model = MODELS[name](tied)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What is sharded one by one."""
    return next(list(m) for m in model.modules() if isinstance(m, nn.ModuleList))


def batch(step: int, rank: int, part: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, ``[2, LENGTH]``."""
    generator = torch.Generator().manual_seed(10000 * step + 100 * rank + part)
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
