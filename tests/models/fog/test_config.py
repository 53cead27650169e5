"""FOG's configuration: sizes, parameter counts, and errors that name the key."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from foundry_fp8.config import ConfigError
from foundry_fp8.models.fog import SIZES, VARIANTS, FogConfig, FogForCausalLM

PUBLISHED = {"390m": 0.386, "1.5b": 1.544, "8b": 8.053}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameter_counts_are_the_published_ones(variant: str, size: str) -> None:
    config = FogConfig(variant=variant, size=size)
    with torch.device("meta"):
        model = FogForCausalLM(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == PUBLISHED[size]


def test_fog_and_swiglu_have_the_same_matrices() -> None:
    def matrices(variant: str) -> int:
        with torch.device("meta"):
            model = FogForCausalLM(FogConfig(variant=variant, size="1.5b"))
        return sum(p.numel() for p in model.parameters() if p.dim() > 1)

    assert len({matrices(variant) for variant in VARIANTS}) == 1


def test_the_softmax_scales_are_those_of_the_reference() -> None:
    scales = {v: FogConfig(variant=v, size="8b").softmax_scale for v in VARIANTS}
    assert scales["fog-max"] == scales["fog-opt"] == pytest.approx(0.125)
    assert scales["fog-flash"] == scales["llama3"] == pytest.approx(128**-0.5)


def test_removed_keys_pass_where_they_had_no_effect_and_say_what_to_do_where_they_had() -> None:
    FogConfig(size="390m", qk_gain_value=1.0, mlp_input_scale=None)
    with pytest.raises(ConfigError, match=r"model\.qk_gain_value: it was removed\. Multiply softmax_scale"):
        FogConfig(size="390m", qk_gain_value=2.0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"variant": "fog-mx"}, r"model\.variant: 'fog-mx' is not one of .*Did you mean 'fog-max'"),
        ({"size": "1b"}, r"model\.size: '1b' is not one of 390m, 1\.5b, 8b"),
        (
            {"activation": "gelu"},
            r"model\.activation: 'gelu' contradicts variant=fog-max, which means 'xielu'",
        ),
        ({"variant": "llama3", "post_norm": True}, r"model\.post_norm: True contradicts variant=llama3"),
        ({"variant": "custom", "activation": "gelo"}, r"model\.activation: 'gelo' is not one of .*'gelu'"),
        ({"variant": "custom", "qk_norm": "layer"}, r"model\.qk_norm: 'layer' is not one of none, rms, tanh"),
        (
            {"hidden_size": 96, "num_attention_heads": 4},
            r"model\.num_hidden_layers: missing\. Give hidden_size",
        ),
        (
            {"hidden_size": 96, "num_attention_heads": 5, "num_hidden_layers": 1},
            r"model\.num_attention_heads: 5 does not divide hidden_size=96",
        ),
        (
            {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 3, "num_hidden_layers": 1},
            r"model\.num_key_value_heads: 3 does not divide num_attention_heads=4",
        ),
        (
            {"hidden_size": 12, "num_attention_heads": 4, "num_hidden_layers": 1},
            r"model\.head_dim: 3 .*is odd",
        ),
        (
            {"size": "390m", "head_dim": 64},
            r"model\.head_dim: 64 contradicts size=390m, whose head_dim is 128",
        ),
        (
            {"size": "390m", "num_hidden_layers": 0},
            r"model\.num_hidden_layers: 0 is not an integer of at least 1",
        ),
        (
            {"size": "390m", "initializer_range": 0.0},
            r"model\.initializer_range: 0\.0 is not a number above 0",
        ),
        (
            {"size": "390m", "attention_dropout": 1.0},
            r"model\.attention_dropout: 1\.0 is not a number of at least 0 and below 1",
        ),
        ({"size": "390m", "sliding_window": 0}, r"model\.sliding_window: 0 is not"),
        (
            {"size": "390m", "rope_scaling": {"factor": 2}},
            r"model\.rope_scaling: .* mapping of exactly factor",
        ),
        ({"size": "390m", "softmax_scale": -0.1}, r"model\.softmax_scale: -0\.1 is not a number above 0"),
        ({"size": "390m", "norm_eps": 0}, r"model\.norm_eps: 0 is not a number above 0"),
        ({"size": "390m", "rope_theta": 0.0}, r"model\.rope_theta: 0\.0 is not a number above 0"),
        ({"size": "390m", "intermediate_size": 0}, r"model\.intermediate_size: 0 is not an integer"),
        ({"size": "390m", "vocab_size": 0}, r"model\.vocab_size: 0 is not an integer"),
        ({"size": "390m", "num_attention_heads": 7}, r"model\.num_key_value_heads: 4 does not divide"),
        (
            {"size": "390m", "variant": "llama3", "qk_norm_over": "projection"},
            r"model\.qk_norm_over: 'projection' has no effect in variant=llama3",
        ),
        (
            {"size": "390m", "tanh_alpha_init": 0.5},
            r"model\.tanh_alpha_init: 0\.5 has no effect in variant=fog-max: it belongs to qk_norm: tanh",
        ),
        (
            {"size": "390m", "tanh_alpha_trainable": False},
            r"model\.tanh_alpha_trainable: False has no effect",
        ),
        (
            {"size": "390m", "variant": "custom", "post_norm_gain": 0.1},
            r"model\.post_norm_gain: 0\.1 has no effect .*post_norm or layer_scale",
        ),
        (
            {"size": "390m", "variant": "custom", "qk_gain": "trainable"},
            r"model\.qk_gain: 'trainable' has no effect",
        ),
        (
            {"size": "390m", "variant": "custom", "qk_norm": "rms", "qk_gain": "fixed"},
            r"model\.qk_gain: 'fixed' is not one of frozen, trainable",
        ),
        (
            {"size": "390m", "variant": "custom", "post_norm": True, "layer_scale": True},
            r"model\.layer_scale: true contradicts post_norm: true",
        ),
        (
            {"size": "390m", "qk_norm_over": "token"},
            r"model\.qk_norm_over: 'token' is not one of head, projection",
        ),
    ],
)
def test_bad_values_fail_at_construction(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FogConfig(**kwargs)


def test_open_choices_of_a_variant_can_be_made() -> None:
    assert FogConfig(variant="op1", size="390m", activation="gelu").activation == "gelu"
    custom = FogConfig(variant="custom", size="390m", qk_norm="tanh", activation="xielu")
    assert custom.pre_norm and custom.qk_norm == "tanh" and custom.intermediate_size == 6144


def test_tied_embeddings_warn_with_the_logit_they_imply() -> None:
    with pytest.warns(UserWarning, match=r"starts at about hidden_size \* initializer_range = 20\.5"):
        FogConfig(variant="fog-max", size="390m", initializer_range=0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FogConfig(variant="fog-max", size="390m").initializer_range == 0.001
        assert FogConfig(variant="fog-max", size="1.5b").initializer_range == 0.02
        assert FogConfig(variant="llama3", size="390m").initializer_range == 0.02


@pytest.mark.parametrize("variant", [*VARIANTS, "custom"])
def test_a_saved_configuration_is_the_same_configuration(variant: str, tmp_path: Any) -> None:
    config = FogConfig(
        variant=variant, hidden_size=64, num_hidden_layers=3, num_attention_heads=2, rope_scaling=False
    )
    config.save_pretrained(tmp_path)
    loaded = FogConfig.from_pretrained(tmp_path)
    ignored = {"_name_or_path", "transformers_version", "_commit_hash"}
    assert {k: v for k, v in loaded.to_dict().items() if k not in ignored} == {
        k: v for k, v in config.to_dict().items() if k not in ignored
    }
