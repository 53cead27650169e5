"""Shapes of the models that the YAMLs of this package name, so that they can be planned without a hub.

Each is what the model's publication and model card state of its architecture. Whoever has the model gives its folder instead.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MODEL_SHAPES"]

_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def _llama(width: int, mlp: int, heads: int, layers: int, positions: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_attention_heads": heads}
    return {**_LLAMA_3, **sizes, "num_hidden_layers": layers, "max_position_embeddings": positions}


MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B": _llama(4096, 14336, 32, 32, 8192),
    "meta-llama/Meta-Llama-3-70B": _llama(8192, 28672, 64, 80, 8192),
    "meta-llama/Llama-3.1-405B": _llama(16384, 53248, 128, 126, 131072),
    "./Qwen3-8B-FP8": _llama(4096, 12288, 32, 36, 40960)
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
    | {"vocab_size": 151936, "rope_theta": 1000000.0},
    "mistralai/Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
}
"""``config.json`` by the name on the Hugging Face hub (Grattafiori et al., arXiv 2407.21783, table 3; Yang et al., arXiv 2505.09388, table 1; Jiang et al., arXiv 2401.04088, table 1)."""
