"""Targets on MPT against LLM Foundry's own choice, and on a Hugging Face decoder."""

from __future__ import annotations

import random

import pytest
import torch
from composer.distributed.activation_checkpointing import generate_default_check_fn
from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM
from torch import nn

from foundry_fp8.activations.checkpointing.targets import select
from foundry_fp8.config import ConfigError


@pytest.fixture(scope="module")
def mpt():
    torch.manual_seed(0)
    config = MPTConfig(
        d_model=32,
        n_heads=2,
        n_layers=6,
        max_seq_len=16,
        vocab_size=64,
        attn_config={"attn_type": "grouped_query_attention", "kv_n_heads": 1, "attn_impl": "torch"},
        ffn_config={"ffn_type": "mptglu"},
        norm_type="low_precision_layernorm",
    )
    return MPTForCausalLM(config)


PRESENT = ["mptblock", "MPTBlock", "grouped_query_attention", "mptglu"]
PRESENT += ["low_precision_layernorm", "layernorm"]
ABSENT = ["mptmlp", "norm_attn_norm", "multihead_attention", "low_precision_rmsnorm", "rmsnorm"]


def blocks(rng):
    return rng.choice(
        ["first-2", "last-2", "middle-2", "range-1-4", "first-1, last-1", "first-0", 2, 0, [0, 5], [1, "last-1"], [9],
         "first-x", "first", None, 1.5, "range-3", "last-9"]
    )  # fmt: skip


def spec(rng):
    shape = rng.random()
    names = PRESENT + ABSENT + ["gelu", "mptblok", ""]
    if shape < 0.1:
        return rng.choice([None, [], {}, 3, "mptblock", "mptmlp", "nope"])
    if shape < 0.2:
        return rng.sample(names, rng.randint(1, 2))
    return {name: blocks(rng) for name in rng.sample(names, rng.choice([1, 1, 2, 3]))}


def foundrys_choice(model, target):
    """Names that LLM Foundry's activation_checkpointing_fn takes; Composer calls it on every module."""
    model.config.activation_checkpointing_target = target
    chooses = generate_default_check_fn(model)
    try:
        return [name for name, module in model.named_modules() if chooses(module)]
    except TypeError:
        return "TypeError"
    except (ValueError, AssertionError, AttributeError):
        return "error"
    finally:
        model.config.activation_checkpointing_target = None


@pytest.mark.parametrize("count", [75, pytest.param(300, marks=pytest.mark.full)])
def test_generated_targets_choose_what_foundry_chooses(mpt, count):
    """Two differences. What names nothing ({}, or a name that no module has) is an error here, and nothing in Foundry. And mptglu, whose registry
    entry is a function and not a class, ends in a TypeError of isinstance in Foundry; here it is the class of that name.
    """
    rng = random.Random(6)
    same = errors = absent = builders = 0
    for _ in range(count):
        target = spec(rng)
        theirs = foundrys_choice(mpt, target)
        try:
            ours = [s.name for s in select(mpt, target, "full", "targets")]
        except ConfigError as error:
            ours = "error"
            if theirs != "error":
                named = [target] if isinstance(target, str) else list(target)
                nothing = target == {} and "a mapping that is not empty" in str(error)
                assert nothing or set(named) & set(ABSENT), (target, theirs, error)
                assert nothing or "names nothing in this model" in str(error)
                absent += 1
                continue
        if theirs == "TypeError":
            builders += 1
            named = [target] if isinstance(target, str) else list(target)
            assert "mptglu" in named
            continue
        assert ours == theirs, target
        same, errors = same + (theirs != "error"), errors + (theirs == "error")
    assert min(same, errors) > count / 10 and min(absent, builders) > count / 50, (
        same,
        errors,
        absent,
        builders,
    )


def test_seed_targets_of_the_reference_run(mpt):
    chosen = select(mpt, {"mptblock": "first-2", "grouped_query_attention": "last-4"}, "full", "targets")
    assert [s.name for s in chosen] == [
        *(f"transformer.blocks.{i}" for i in (0, 1)),
        *(f"transformer.blocks.{i}.attn" for i in (2, 3, 4, 5)),
    ]


def names(model, targets):
    return [s.name for s in select(model, targets, "full", "targets")]


def test_class_names_and_patterns_on_a_hugging_face_decoder(make_llama):
    model = make_llama(6)
    assert names(model, None) == [f"model.layers.{i}" for i in range(6)]
    assert names(model, {"LlamaDecoderLayer": "first-1, last-1"}) == ["model.layers.0", "model.layers.5"]
    assert names(model, {"llamamlp": "every-4"}) == ["model.layers.0.mlp", "model.layers.4.mlp"]
    assert names(model, {"*.mlp": "first-1", "*.self_attn": "first-2"}) == [
        "model.layers.0.self_attn",
        "model.layers.0.mlp",
        "model.layers.1.self_attn",
    ]
    assert names(model, "model.layers.1.*proj") == [
        f"model.layers.1.{n}"
        for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                  "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]  # fmt: skip


def test_mappings_give_each_target_its_policy(make_llama):
    targets = [
        {"target": "LlamaDecoderLayer", "blocks": [0, 1], "policy": "selective"},
        {"target": "LlamaDecoderLayer", "blocks": [2]},
        {"target": "*.mlp", "blocks": "last-1", "policy": ["aten.mm"]},
    ]
    chosen = select(make_llama(6), targets, "full", "targets")
    assert [(s.name, s.policy) for s in chosen] == [
        ("model.layers.0", "selective"),
        ("model.layers.1", "selective"),
        ("model.layers.2", "full"),
        ("model.layers.5.mlp", ["aten.mm"]),
    ]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            "LlamaDecoderLayr",
            "names nothing .* classes LlamaDecoderLayer, .* Did you mean 'LlamaDecoderLayer'",
        ),
        ({"*.attention": "first-1"}, r"\*\.self_attn"),
        ({"LlamaDecoderLayer": "first-3", "LlamaMLP": "range-2-4"}, "block 2 belongs to both"),
        ({"LlamaDecoderLayer": "first-1", "*.mlp": "every-2"}, "layers.0.mlp lies inside model.layers.0"),
        ({"*.mlp": "first-1", "model.layers.0.m*": "first-1"}, "is named by both|lies inside"),
        ({"LlamaDecoderLayer": None}, "no blocks given"),
        ([{"target": "LlamaMLP", "policy": "ful"}], r"targets\[0\].policy: 'ful' is not full, selective"),
        ([{"traget": "LlamaMLP"}], r"targets\[0\].traget: unknown key"),
        (3, "is not a string .*, a list of mappings, a mapping .* or null"),
        ({"LlamaMLP": -1}, r"targets\.LlamaMLP: -1 does not name blocks"),
        ({}, "a mapping that is not empty"),
    ],
)
def test_bad_targets_say_what_to_do(make_llama, targets, message):
    with pytest.raises(ConfigError, match=message):
        names(make_llama(6), targets)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="Linear has no list of transformer blocks"):
        names(torch.nn.Linear(2, 2), None)


def test_a_list_of_modules_which_nobody_calls_is_no_target():
    """A checkpoint around it would recompute nothing. Its members may be targets."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, num_local_experts=4,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    with pytest.raises(
        ConfigError, match=r"'\*\.experts' names .*experts, which holds modules .*\*\.experts\.\*"
    ):
        select(model, "*.experts", "full", "k")
    with pytest.raises(ConfigError, match="names nothing in this model"):
        select(model, "ModuleList", "full", "k")
    assert len(select(model, "*.experts.[0-3]", "full", "k")) == 8


class Mamba(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.mixer(x)


class Hybrid(Mamba):
    """Zamba's: beside attention it holds a block of the other class."""

    def __init__(self):
        super().__init__()
        self.attention, self.mamba = nn.Linear(8, 8), Mamba()


def test_every_block_is_no_block_inside_a_block():
    model = nn.Module()
    model.layers = nn.ModuleList([Mamba(), Hybrid(), Mamba()])

    def names(targets):
        return [selected.name for selected in select(model, targets, "full", "targets")]

    assert names(None) == ["layers.0", "layers.1", "layers.2"]
    assert names({"Hybrid": "middle-1"}) == ["layers.1"]
    with pytest.raises(ConfigError, match=r"layers\.1\.mamba lies inside layers\.1"):
        names("Mamba")
