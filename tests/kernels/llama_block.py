"""One block of Hugging Face's Llama, to count and time what it asks of the host."""

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import foundry_fp8
from tests.kernels.fake_driver import TorchLaunches


class LlamaBlock(nn.Module):
    """The block with its positions: ``[1, tokens, size]`` to the same; as many tokens as features, where nothing else is said."""

    def __init__(self, size, tokens=None, **sizes):
        super().__init__()
        sizes = {"hidden_size": size, "intermediate_size": 2 * size, "num_attention_heads": 2} | sizes
        config = LlamaConfig(
            **sizes, num_key_value_heads=1, num_hidden_layers=1, vocab_size=32, attn_implementation="sdpa"
        )
        self.block, positions = LlamaDecoderLayer(config, 0), torch.arange(tokens or size)[None]
        embeddings = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.bfloat16), positions)
        self.given = {"position_ids": positions, "position_embeddings": embeddings}

    def forward(self, x):
        y = self.block(x, **self.given)
        return y if isinstance(y, torch.Tensor) else y[0]


def eighth(recipe, **options):
    """An eighth of Llama-3 8B's block in each direction, but for a head's, beside 1024 tokens, an eighth of 8192; bfloat16 or converted."""
    block = LlamaBlock(512, 1024, intermediate_size=1792, num_attention_heads=4).to(torch.bfloat16).train()
    if recipe is not None:
        foundry_fp8.apply_fp8(block, recipe=recipe, backend="native", **options)
    return block


def moved(block, seen):
    """Bytes that :func:`eighth`'s forward and backward read and write outside of GEMMs and attention, on the driver that launches nothing."""
    x, seen.checks = torch.zeros(1, 1024, 512, dtype=torch.bfloat16, requires_grad=True), True
    for _ in range(2):
        seen.moved = 0
        with TorchLaunches(seen):
            y = block(x)
            y.backward(torch.empty_like(y))
    return seen.moved
