"""Every option that a YAML can name and what it takes, by hand and apart from the package."""

from __future__ import annotations

import math
import re

from hypothesis import strategies as st

from tests.combinations.takes import (
    ATTENTION,
    BATCHES,
    BLOCKS,
    FLAG,
    FORMAT,
    MEASURED,
    NAMES,
    NULL,
    PATH,
    POLICY,
    POSITIVE,
    RECIPE,
    RULES,
    SIZE,
    TARGET,
    TEXT,
    TIME,
    Takes,
    either,
    number,
    only,
    some,
    table,
    whole,
    word,
)

ALGORITHMS: dict[str, dict[str, Takes]] = {
    "fp8": {
        "recipe": either(
            word("delayed", "current", "block", "mxfp8", "nvfp4", "unit", "auto", "measured"), RECIPE, RULES, MEASURED
        ),
        "backend": word("auto", "transformer_engine", "native", "emulated"),
        "accumulation": word("float32", "hopper"),
        "include": some(TEXT, least=1),
        "exclude": NAMES,
        "keep_first_blocks": whole(0),
        "keep_last_blocks": whole(0),
        "wgrad": word("fp8", "high_precision"),
        "evaluate": word("fp8", "high_precision"),
        "fuse": either(word("auto"), FLAG),
        "cache_weights": either(word("auto"), FLAG),
        "frozen_weights": word("high_precision", "fp8"),
        "attention": either(FLAG, ATTENTION),
        "enabled": FLAG,
        "announce": FLAG,
    },
    "activation_checkpointing": {
        "targets": either(
            NULL,
            TEXT,
            NAMES,
            table(TEXT, BLOCKS, least=1),
            some(TARGET),
        ),
        "policy": POLICY,
        "budget": either(
            NULL,
            Takes(lambda v: type(v) is float and 0 < v <= 1, st.floats(0.01, 1)),
            Takes(
                lambda v: isinstance(v, str) and v[-1:].isalpha() and SIZE.holds(v) and not re.match(r"\s*0+(\.0+)?\D", v),
                st.sampled_from(["20GiB", "1.5 mb"]),
                lambda v: not (isinstance(v, str) and re.match(r"\s*0", v)),
            ),
            word("fit"),
        ),
        "offload": FLAG,
        "compression": only("exact"),  # by itself; another word needs a budget beside it
    },
    "activation_compression": {
        "format": FORMAT,
        "block_size": either(NULL, only(16, 32, 64, 128, 256, 512, 1024)),
        "targets": either(NAMES, table(TEXT, FORMAT, least=1)),
        "overrides": Takes(
            lambda v: isinstance(v, dict)
            and all(
                (k in ("norm", "activation", "boundary", "other") and x in ("int8", "e4m3", "int4", "exact", "none"))
                or (k == "loss" and x in ("exact", "none"))
                for k, x in v.items()
            ),
            st.dictionaries(st.sampled_from(["norm", "activation", "boundary", "other", "loss"]),
                            st.sampled_from(["exact", "none"]), max_size=3),
        ),
        "min_numel": whole(0),
    },
    "compressed_communication": {
        "gradients": word("bf16", "int8", "e4m3", "int4"),  # none: only with parameters
        "parameters": word("none", "e4m3", "int8"),
        "activations": word("none", "fp8"),
        "block_size": whole(32, 65536, lambda n: not n & (n - 1)),
        "second_leg": word("auto", "fp32", "bf16", "int8", "e4m3", "int4"),
        "error_feedback": either(word("auto"), FLAG),
        "rounding": word("nearest", "stochastic"),
        "warmup": BATCHES,
        "min_bytes": SIZE,
        "scope": word("auto", "inter_node", "all"),
        "inside_node": word("auto", "exact", "int8"),
        "adapt": FLAG,
        "sample_interval": BATCHES,
        "check_replicas": FLAG,
    },
    "hybrid_sharding": {
        "shard": either(word("node", "auto"), whole(1)),
        "state_fraction": number(0, 1, without=(0,)),
        "optimizer_bytes": whole(0),
        "check_replicas": FLAG,
    },
    "fused_head": {"head": either(NULL, TEXT), "chunk_tokens": either(NULL, whole(1))},
    "unit_scaling": {"base_width": either(only(None), whole(1))},
}  # fmt: skip
CALLBACKS: dict[str, dict[str, Takes]] = {
    "mfu_monitor": {
        "interval": whole(1),
        "peak_flops": either(
            word("auto", "measured"),
            POSITIVE,
            table(word("fp4", "fp8", "bf16", "fp16", "tf32", "fp32"), POSITIVE, least=1),
        ),
        "details": FLAG,
    },
    "kurtosis_monitor": {
        "interval": whole(1),
        "roles": some(
            word("residual", "qkv_input", "qkv_output", "q", "k", "fc1_output", "fc2_input", "fc2_output"),
            least=1,
        ),
        "tensors": table(TEXT, some(TEXT, least=1)),
        "gradients": FLAG,
        "details": FLAG,
    },
    "fp8_monitor": {"interval": whole(1), "worst": whole(0), "details": FLAG},
    "divergence_guard": {
        "interval": whole(1),
        "rows": whole(1),
        "loss_limit": POSITIVE,
        "gradient_limit": POSITIVE,
        "actions": some(word("warn", "demote", "stop"), least=1),
        "finer": FLAG,
        "passes": whole(1),
        "quiet_batches": whole(1),
        "details": FLAG,
    },
}
LOGGERS = {"run_log": {"path": either(NULL, PATH)}}
SCHEDULERS = {
    "wsd": {
        "t_warmup": TIME,
        "t_decay": TIME,
        "t_max": TIME,
        "alpha_f": number(0, 1),
        "shape": word("1-sqrt", "linear"),
    }
}
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
NOT_IN_FOG_MAX = (
    word()
)  # a named variant takes its own value alone; tests/models/fog/test_config.py has the rest
FOREIGN = Takes(lambda v: v is None, st.none(), lambda v: v is None or not isinstance(v, list | dict | str))
FOG: dict[str, Takes] = {
    "variant": word(
        "fog-max", "fog-opt", "fog-flash", "llama3", "olmo2", "op1", "llama3-smooth-swiglu", "custom"
    ),
    "size": NULL,  # a preset beside TINY's dimensions is another question
    "vocab_size": whole(1, 5000),
    "hidden_size": whole(4, 512, lambda n: n % 4 == 0),
    "intermediate_size": either(NULL, whole(1, 5000)),
    "num_hidden_layers": Takes(whole(1).holds, st.integers(1, 4), lambda v: type(v) is not int or v < 20),
    "num_attention_heads": only(1, 2, 4, 8, 16),
    "num_key_value_heads": either(NULL, only(1, 2)),
    "head_dim": either(NULL, whole(2, 512, lambda n: n % 2 == 0)),
    "max_position_embeddings": whole(1, 5000),
    "rope_theta": POSITIVE,
    "rope_scaling": only(None, False),
    "norm_eps": POSITIVE,
    "initializer_range": either(NULL, POSITIVE),
    "qk_norm_over": word("head", "projection"),
    "tanh_alpha_init": only(1, 1.0),
    "tanh_alpha_trainable": only(True),
    "softmax_scale": either(NULL, POSITIVE),
    "sliding_window": either(NULL, whole(1)),
    "attention_dropout": number(0, 1, without=(1,)),
    "tie_word_embeddings": either(NULL, FLAG),
    "sequence_ids": FLAG,
    "use_cache": FLAG,
    "pre_norm": only(False),
    "post_norm": only(True),
    "post_norm_gain": NULL,
    "final_norm": only(False),
    "layer_scale": only(False),
    "qk_norm": word("rms"),
    "qk_gain": word("frozen"),
    "softmax_scale_factor": only(math.sqrt(2)),
    "activation": word("xielu"),
    "input_scaling": only(True),
    "init_device": word("cpu", "meta", "mixed"),
    "attn_implementation": word("sdpa", "eager"),
    "use_train_metrics": FLAG,
    "should_save_peft_only": FLAG,
    "allow_embedding_resizing": FLAG,
    "pretrained_model_name_or_path": FOREIGN,
    "peft_config": FOREIGN,
    "additional_train_metrics": FOREIGN,
    "additional_eval_metrics": FOREIGN,
}
TAU = number(0, 1, without=(0, 1))
_SHARED = (
    "vocab_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "rope_theta", "rope_scaling", "norm_eps", "sliding_window", "attention_dropout", "sequence_ids", "use_cache",
    "size", "hidden_size", "num_attention_heads", "init_device", "attn_implementation", "use_train_metrics",
    "should_save_peft_only", "allow_embedding_resizing", "pretrained_model_name_or_path", "peft_config",
    "additional_train_metrics", "additional_eval_metrics",
)  # fmt: skip
MUS = {
    **{name: FOG[name] for name in _SHARED},
    "rope_scaling": only(False),
    "hidden_multiplier": either(NULL, POSITIVE),
    "final_norm": FLAG,
    "qk_norm": word("none", "rms"),
    "square_root_softmax": FLAG,
    "tau": either(NULL, TAU),
    "activation": word("gelu", "silu", "relu"),
    "tie_word_embeddings": only(False),
}
GAIN = either(NULL, POSITIVE)
FFN: dict[str, Takes] = {
    "ffn_hidden_size": either(NULL, whole(1, 5000)),
    "post_norm_gain": GAIN,
    "norm_eps": POSITIVE,
}
PARTS: dict[str, dict[str, Takes]] = {
    "fog_ffn": {**FFN, "ffn_act": word("xielu", "gelu", "relu")},
    "smooth_swiglu": FFN,
    "fog_attention": {
        "kv_n_heads": either(NULL, only(1, 2), Takes(lambda v: False, st.nothing(), lambda v: type(v) is not int or v < 3)),
        "qk_norm": word("rms", "tanh", "none"),
        "tanh_alpha_init": POSITIVE,
        "post_norm_gain": GAIN,
        "norm_eps": POSITIVE,
    },
    "mus_attention": {"norm_eps": POSITIVE, "tau": TAU},
    "no_norm": {"eps": either(NULL, POSITIVE)},
    "mus_norm": {"eps": POSITIVE},
    "mus_ffn": {"ffn_hidden_size": FFN["ffn_hidden_size"], "ffn_act": word("gelu", "silu", "relu"), "norm_eps": POSITIVE, "tau": TAU},
}  # fmt: skip
KINDS = {
    "algorithms": ALGORITHMS,
    "callbacks": CALLBACKS,
    "loggers": LOGGERS,
    "scheduler": SCHEDULERS,
    "model": {"fog_causal_lm": FOG, "mus_causal_lm": MUS},
    "model.ffn_config": {name: PARTS[name] for name in ("fog_ffn", "smooth_swiglu", "mus_ffn")},
    "model.attn_config": {name: PARTS[name] for name in ("fog_attention", "mus_attention")},
    "model.norm": {name: PARTS[name] for name in ("no_norm", "mus_norm")},
}
