"""One block of Hugging Face's Llama, to count and time what it asks of the host."""

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding


class LlamaBlock(nn.Module):
    """The block with its positions: ``[1, size, size]`` to the same."""

    def __init__(self, size):
        super().__init__()
        config = LlamaConfig(
            hidden_size=size, intermediate_size=2 * size, num_attention_heads=2, num_key_value_heads=1,
            num_hidden_layers=1, vocab_size=32, attn_implementation="sdpa",
        )  # fmt: skip
        self.block, positions = LlamaDecoderLayer(config, 0), torch.arange(size)[None]
        embeddings = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.bfloat16), positions)
        self.given = {"position_ids": positions, "position_embeddings": embeddings}

    def forward(self, x):
        y = self.block(x, **self.given)
        return y if isinstance(y, torch.Tensor) else y[0]
