from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama(layers: int = 6, **options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        **options,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def make_llama():
    return llama
