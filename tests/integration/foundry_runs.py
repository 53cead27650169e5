"""Small real LLM Foundry runs: data, tokenizer and config made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 512
SEQ = 64


DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ,
    "tie_word_embeddings": False,
}
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **DECODER},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, **DECODER},
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        **DECODER,
    },
    "dbrx": {
        "architectures": ["DbrxForCausalLM"],
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": SEQ,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
}
"""``config.json`` by model type, without what every one has."""


def make_data(root: Path) -> Path:
    """A byte-level tokenizer and an MDS dataset of random tokens with some structure; returns ``root``."""
    from streaming import MDSWriter
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=SEQ
    ).save_pretrained(root / "tokenizer")

    rng = np.random.default_rng(0)
    with MDSWriter(out=str(root / "data" / "train"), columns={"tokens": "ndarray:int32"}) as out:
        for _ in range(128):
            tokens = np.cumsum(rng.integers(0, 5, SEQ)) % 257
            out.write({"tokens": tokens.astype(np.int32)})

    for model_type, sizes in HUGGING_FACE.items():
        (root / model_type).mkdir()
        found = {"model_type": model_type, "vocab_size": VOCAB, **sizes}
        (root / model_type / "config.json").write_text(json.dumps(found))
    return root


MPT = {
    "name": "mpt_causal_lm",
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "expansion_ratio": 2,
    "max_seq_len": SEQ,
    "vocab_size": VOCAB,
    "no_bias": True,
    "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "attn_impl": "torch"},
    "loss_fn": "torch_crossentropy",
    "init_device": "cpu",
}


def hugging_face(root: Path, model_type: str) -> dict[str, Any]:
    return {
        "name": "hf_causal_lm",
        "pretrained_model_name_or_path": str(root / model_type),
        "pretrained": False,
        "use_flash_attention_2": False,
        "init_device": "cpu",
    }


def config(root: Path, **changes: Any) -> dict[str, Any]:
    """A config that trains 4 batches of 2 microbatches in a few seconds; top-level keys are replaced by ``changes``."""
    loader = {
        "name": "text",
        "dataset": {
            "local": str(root / "data"),
            "split": "train",
            "shuffle": True,
            "shuffle_seed": 17,
            "max_seq_len": SEQ,
        },
        "drop_last": True,
        "num_workers": 0,
        "prefetch_factor": None,
        "persistent_workers": False,
    }
    base = {
        "seed": 17,
        "max_seq_len": SEQ,
        "model": dict(MPT),
        "tokenizer": {"name": str(root / "tokenizer"), "kwargs": {"model_max_length": SEQ}},
        "train_loader": loader,
        "optimizer": {"name": "decoupled_adamw", "lr": 3.0e-3},
        "scheduler": {"name": "constant_with_warmup", "t_warmup": "1ba"},
        "max_duration": "4ba",
        "eval_interval": 0,
        "global_train_batch_size": 8,
        "device_eval_batch_size": 4,
        "device_train_microbatch_size": 2,
        "precision": "fp32",
        "progress_bar": False,
        "log_to_console": False,
        "python_log_level": "warning",
        "algorithms": {"fp8": {"recipe": "delayed"}},
    }
    return {**base, **changes}


def weights(trainer: Any) -> dict[str, Any]:
    """The parameters of a trainer's model by the names of the plain model, copied."""
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): p.detach().clone()
        for name, p in trainer.state.model.named_parameters()
    }


def train(cfg: dict[str, Any]) -> Any:
    """Run LLM Foundry's own entry; returns Composer's trainer."""
    from llmfoundry.command_utils.train import train as foundry_train
    from omegaconf import OmegaConf

    _clean_shared_memory()
    return foundry_train(OmegaConf.create(cfg))


def _clean_shared_memory() -> None:
    """What the datasets of earlier runs in this process have left. Another worker may be cleaning the same names."""
    from streaming.base.util import clean_stale_shared_memory

    while True:
        try:
            return clean_stale_shared_memory()
        except FileNotFoundError:  # the other one was faster: go on with the rest
            continue
