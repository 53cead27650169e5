"""Every option that a YAML can name, with every kind of value, through LLM Foundry's own builders.

What an option takes is written out here, by hand and apart from the package, so that an annotation that is too lax shows. For
each option a value is drawn: something it takes, something another option takes, or nonsense (null, NaN, infinity, a number
below zero, a bool for a number, a list, a mapping, a time, a path). A value is either accepted by both sides, or refused by a
``ConfigError`` that begins with the whole path of its key.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from foundry_fp8.config import ConfigError

pytestmark = pytest.mark.integration


class Takes(NamedTuple):
    """What an option takes: the test of a value, and how to draw one."""

    holds: Callable[[Any], bool]
    draw: st.SearchStrategy[Any]
    judged: Callable[[Any], bool] = lambda value: True
    """Values that it may hand on to others, whose word it is, are not judged."""


def whole(low: int, high: int = 10**30, where: Callable[[int], bool] = lambda n: True) -> Takes:
    return Takes(
        lambda v: type(v) is int and low <= v <= high and where(v),
        st.integers(low, min(high, low + 300)).filter(where),
    )


def number(low: float, high: float = math.inf, *, without: tuple[float, ...] = ()) -> Takes:
    def holds(v: Any) -> bool:
        return type(v) in (int, float) and abs(v) < 3.4e38 and low <= v <= high and v not in without

    return Takes(holds, st.floats(low, min(high, 1e3)).filter(holds))


def word(*choices: str) -> Takes:
    return Takes(lambda v: isinstance(v, str) and v in choices, st.sampled_from(choices or [""]))


def only(*values: Any) -> Takes:
    return Takes(lambda v: any(type(v) is type(x) and v == x for x in values), st.sampled_from(values))


def either(*takes: Takes) -> Takes:
    return Takes(
        lambda v: any(t.holds(v) for t in takes),
        st.one_of([t.draw for t in takes]),
        lambda v: all(t.judged(v) for t in takes),
    )


def some(of: Takes, *, least: int = 0) -> Takes:
    return Takes(
        lambda v: isinstance(v, list) and len(v) >= least and all(of.holds(x) for x in v),
        st.lists(of.draw, min_size=least, max_size=3),
    )


def table(keys: Takes, values: Takes, *, least: int = 0) -> Takes:
    def holds(v: Any) -> bool:
        return (
            isinstance(v, dict)
            and len(v) >= least
            and all(keys.holds(k) and values.holds(x) for k, x in v.items())
        )

    return Takes(holds, st.dictionaries(keys.draw, values.draw, min_size=least, max_size=3))


FLAG = only(True, False)
NULL = only(None)
POSITIVE = number(0, without=(0,))
PRINTABLE = st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), min_size=1, max_size=8)
TEXT = Takes(lambda v: isinstance(v, str) and v != "" and v.isprintable(), PRINTABLE)
NAMES = some(TEXT)
FIELDS = ("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")


def is_path(v: Any) -> bool:
    plain = re.sub("{(" + "|".join(FIELDS) + ")}", "", v) if isinstance(v, str) else ""
    return isinstance(v, str) and v != "" and v.isprintable() and not set("{}") & set(plain)


PATH = Takes(is_path, st.sampled_from(["logs/a.jsonl", "{run_name}/x", "/tmp/x-{rank}"]),
             lambda v: not isinstance(v, str) or ("{{" not in v and "}}" not in v and "{run_name" not in v.replace("{run_name}", "")))  # fmt: skip
BATCHES = Takes(
    lambda v: (
        (type(v) is int and v >= 0) or (isinstance(v, str) and re.fullmatch("[0-9]{1,18}ba", v) is not None)
    ),
    st.sampled_from([0, 7, "0ba", "100ba"]),
)
SIZE = Takes(
    lambda v: (
        (type(v) is int and v >= 0)
        or (
            isinstance(v, str)
            and re.fullmatch(r"(?i)\s*[0-9]+(\.[0-9]+)?\s*([kmg]i?)?b?\s*", v) is not None
            and not re.search(r"(?i)[kmg]i?\s*$", v)
        )
    ),
    st.sampled_from([0, 65536, "64KiB", "1.5 MB", "7b"]),
)
TIME = Takes(
    lambda v: (
        isinstance(v, str)
        and re.fullmatch(r"[0-9]+(iter|ep|ba|sp|tok|sec)|[0-9]*\.?[0-9]+dur", v) is not None
    ),
    st.sampled_from(["5ba", "0.1dur", "1000tok", "2ep"]),
)
FORMAT = word("int8", "e4m3", "int4", "exact")
BLOCKS = Takes(
    lambda v: type(v) is int and v >= 0,
    st.integers(0, 20),
    lambda v: (
        not isinstance(v, str | list)
    ),  # tests/activations/checkpointing/test_blocks.py judges the grammar
)
RECIPES = {
    "delayed": {
        "margin": whole(0, 16),
        "amax_history_len": whole(1),
        "amax_compute_algo": word("max", "most_recent"),
        "fast_accumulation": some(word("fprop", "dgrad", "wgrad")),
    },
    "current": {"power_2_scales": FLAG, "fast_accumulation": some(word("fprop", "dgrad", "wgrad"))},
    "block": {"power_2_scales": FLAG},
    "mxfp8": {},
    "unit": {
        "gradient_scale": either(word("auto"), whole(1, 2**60, lambda n: not n & (n - 1))),
        "fast_accumulation": some(word("fprop", "dgrad", "wgrad")),
    },
}


def is_recipe(v: Any) -> bool:
    if not isinstance(v, dict) or not isinstance(v.get("name"), str) or v["name"] not in RECIPES:
        return False
    options = {"fp8_format": word("hybrid", "e4m3"), **RECIPES[v["name"]]}
    return all(key in options and options[key].holds(x) for key, x in v.items() if key != "name")


RECIPE = Takes(
    is_recipe,
    st.one_of(
        [
            st.builds(lambda x, name=name, key=key: {"name": name, key: x}, takes.draw)
            for name, options in RECIPES.items()
            for key, takes in {**options, "fp8_format": word("hybrid", "e4m3")}.items()
        ]
    ),
)

ALGORITHMS: dict[str, dict[str, Takes]] = {
    "fp8": {
        "recipe": either(word("delayed", "current", "block", "mxfp8", "unit", "auto"), RECIPE),
        "backend": word("auto", "transformer_engine", "native", "emulated"),
        "accumulation": word("float32", "hopper"),
        "include": some(TEXT, least=1),
        "exclude": NAMES,
        "keep_first_blocks": whole(0),
        "keep_last_blocks": whole(0),
        "wgrad": word("fp8", "high_precision"),
        "evaluate": word("fp8", "high_precision"),
        "fuse": FLAG,
        "cache_weights": FLAG,
        "attention": FLAG,
        "enabled": FLAG,
        "announce": FLAG,
    },
    "activation_checkpointing": {
        "targets": either(
            NULL,
            TEXT,
            NAMES,
            table(TEXT, BLOCKS, least=1),
            Takes(lambda v: False, st.nothing(), lambda v: not isinstance(v, list | dict) or not any(
                isinstance(x, str | list | dict) for x in (v.values() if isinstance(v, dict) else v))),
        ),
        "policy": either(
            word("full", "selective"), Takes(lambda v: False, st.nothing(), lambda v: not isinstance(v, list))
        ),
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
        "include_checkpoint_boundaries": FLAG,
        "overrides": Takes(
            lambda v: isinstance(v, dict)
            and all(
                (k in ("norm", "activation", "boundary", "other") and x in ("int8", "e4m3", "int4", "exact", "none"))
                or (k == "loss" and x in ("exact", "none"))
                for k, x in v.items()
            ),
            st.dictionaries(st.sampled_from(["norm", "activation", "boundary", "other", "loss"]),
                            st.sampled_from(["exact", "none"]), max_size=3),
            lambda v: not isinstance(v, dict) or all(isinstance(x, str) for x in v.values()),
        ),
        "min_numel": whole(0),
    },
    "compressed_communication": {
        "gradients": word("bf16", "int8", "e4m3", "int4"),  # none: only with parameters
        "parameters": word("none", "e4m3", "int8"),
        "block_size": whole(32, 65536, lambda n: not n & (n - 1)),
        "second_leg": word("auto", "fp32", "bf16", "int8", "e4m3", "int4"),
        "error_feedback": either(word("auto"), FLAG),
        "rounding": word("nearest", "stochastic"),
        "warmup": BATCHES,
        "min_bytes": SIZE,
        "scope": word("auto", "inter_node", "all"),
        "inside_node": word("auto", "exact", "int8"),
        "verify": FLAG,
        "sample_interval": BATCHES,
        "check_replicas": FLAG,
    },
    "hybrid_sharding": {
        "shard": either(word("node", "auto"), whole(1)),
        "replicate": either(word("auto"), whole(1)),
        "state_fraction": number(0, 1, without=(0,)),
        "optimizer_bytes": whole(0),
        "check_replicas": FLAG,
    },
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
        "preset": word("auto", "mpt", "llama", "fog"),
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
        "actions": some(word("warn", "checkpoint", "demote", "stop"), least=1),
        "signals": some(word("kurtosis", "saturated", "flushed", "gradient_norm", "loss"), least=1),
        "finer": either(NULL, word("auto", "current", "block", "mxfp8")),
        "quiet_batches": whole(1),
        "window": whole(10),  # its warm-up is 10
        "warmup": whole(2, 64),  # its window is 64
        "patience": whole(1),
        "checkpoint_folder": PATH,
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
    "qk_gain_value": POSITIVE,
    "qk_norm_over": word("head", "projection"),
    "tanh_alpha_init": only(1, 1.0),
    "tanh_alpha_trainable": only(True),
    "softmax_scale": either(NULL, POSITIVE),
    "mlp_input_scale": either(NULL, POSITIVE),
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
    "mus_ffn": {"ffn_hidden_size": FFN["ffn_hidden_size"], "ffn_act": word("gelu", "silu", "relu"), "norm_eps": POSITIVE, "tau": TAU},
}  # fmt: skip
UNIT = {"name": "unit", "bias": False}
PATHS = {"no_norm": "model.norm_eps"}
"""Where an option is not written under its own name."""


def build(kind: str, name: str, options: dict[str, Any]) -> Any:
    from llmfoundry.models.layers import layer_builders as layers
    from llmfoundry.utils import builders

    if kind == "algorithms":
        return builders.build_algorithm(name, options)
    if kind == "callbacks":
        return builders.build_callback(name, options)
    if kind == "loggers":
        return builders.build_logger(name, options)
    if kind == "scheduler":
        return builders.build_scheduler(name, {"t_warmup": "5ba", **options})
    if kind == "model":
        return builders.build_composer_model(name, {**TINY, **options}, None)
    if name == "mus_ffn":
        return layers.build_ffn(name, 32, 2, "cpu", False, {"tau": 0.4, "fc_type": UNIT, **options})
    if name in ("fog_attention", "mus_attention"):
        own = {"tau": 0.4, "fc_type": dict(UNIT), "bias": False, "attention_bias": False}
        return layers.build_attention_layer(
            name,
            {
                "d_model": 32,
                "n_heads": 2,
                "attn_impl": "torch",
                **(own if name == "mus_attention" else {}),
                **options,
            },
        )
    if name == "no_norm":
        return layers.build_norm(name, 32, **options)
    return layers.build_ffn(name, 32, 2, "cpu", False, options)


KINDS = {
    "algorithms": ALGORITHMS,
    "callbacks": CALLBACKS,
    "loggers": LOGGERS,
    "scheduler": SCHEDULERS,
    "model": {"fog_causal_lm": FOG, "mus_causal_lm": MUS},
    "model.ffn_config": {name: PARTS[name] for name in ("fog_ffn", "smooth_swiglu", "mus_ffn")},
    "model.attn_config": {name: PARTS[name] for name in ("fog_attention", "mus_attention")},
    "model.norm": {"no_norm": PARTS["no_norm"]},
}
CASES = [(kind, name) for kind, names in KINDS.items() for name in names]
EVERY = [(kind, name, option) for kind, name in CASES for option in KINDS[kind][name]]

ODD = st.sampled_from(
    [
        *("", " ", "x", "auto", "none", "null", "true", "nan", "inf", "-5ba", "5ba", "0ba", "1.5ba", "nanba"),
        *(
            "5ep",
            "0.1dur",
            "-1GiB",
            "64KiB",
            "1e3",
            "-1",
            "0",
            "\0",
            "a\nb",
            "{",
            "{}",
            "{nope}",
            "a/{run_name}",
        ),
        *("..", "/", "*.ffn.*", "first-2", "delayed", "int8"),
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([-(2**40), 10**4, 2**40]),
    st.floats(),
    ODD,
    PRINTABLE,
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(ODD, st.sampled_from(["name", "bf16", "margin"])), inner, max_size=3),
    ),
    max_leaves=4,
)


def judge(kind: str, name: str, option: str, value: Any) -> None:
    takes = KINDS[kind][name][option]
    heavy = kind.startswith("model") and type(value) is int and value > 5000  # would only take memory
    assume(takes.judged(value) and not heavy)
    path = PATHS.get(name, f"{kind}.{option}" if kind in ("scheduler",) or "model" in kind else f"{kind}.{name}.{option}")  # fmt: skip
    try:
        build(kind, name, {option: value})
    except ConfigError as error:
        assert not takes.holds(value), f"{path}: refuses {value!r}, which it takes: {error}"
        section = path.rpartition(".")[0]  # of two options that do not go together either may be named first
        together = str(error).startswith(f"{section}.") and re.search(rf"\b{option}\b", str(error))
        assert str(error).startswith(path) or together, (path, error)
    else:
        assert takes.holds(value), f"{path}: accepts {value!r}"


RUN = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda x: x)
def test_a_sample_of_values_is_taken_or_refused_as_it_should_be(kind, name):
    options = KINDS[kind][name]

    @settings(max_examples=60 if kind == "model" else 120, **RUN)
    @given(st.data())
    def holds(data):
        option = data.draw(st.sampled_from(sorted(options)))
        judge(kind, name, option, data.draw(st.one_of(options[option].draw, ANYTHING)))

    holds()


@pytest.mark.full
@pytest.mark.parametrize(("kind", "name", "option"), EVERY, ids=lambda x: x)
def test_every_option_takes_what_it_should_and_nothing_else(kind, name, option):
    options = KINDS[kind][name]
    others = st.one_of([takes.draw for takes in options.values()])

    @settings(max_examples=150 if kind == "model" else 400, **RUN)
    @given(st.one_of(options[option].draw, others, ANYTHING))
    def holds(value):
        judge(kind, name, option, value)

    holds()


def test_no_option_escapes():
    """What the constructors take is what the tables above hold, and every registered name is in them."""
    from foundry_fp8.models.fog.causal_lm import ComposerFogCausalLM
    from foundry_fp8.models.mus.causal_lm import ComposerMusCausalLM
    from foundry_fp8.models.schedule import WarmupStableDecayScheduler

    for kind in ("algorithms", "callbacks"):
        for name, options in KINDS[kind].items():
            assert list(options) == list(vars(build(kind, name, {}).config)), name
    given = inspect.signature(ComposerFogCausalLM).parameters
    for table_, cls in ((FOG, ComposerFogCausalLM), (MUS, ComposerMusCausalLM)):
        assert set(table_) == {*cls.config_keys(), *given} - {"config", "tokenizer"}
    assert set(SCHEDULERS["wsd"]) == set(inspect.signature(WarmupStableDecayScheduler).parameters)
    groups = [name for name in entry_points().groups if name.startswith("llmfoundry_")]
    entries = [e for group in groups for e in entry_points(group=group)]
    registered = {entry.name for entry in entries if entry.value.startswith("foundry_fp8")}
    # `fog` and `unit_normal_` are initialisers, which take modules alone; `unit` is a linear, which takes no option.
    assert registered - {"fog", "unit_normal_", "unit"} == {name for _, name in CASES}
