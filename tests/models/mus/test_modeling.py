"""The µnit-scaled decoder against an independent float64 implementation, and what Hugging Face asks of it."""

import json
import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.unit_linear import UnitLinear
from foundry_fp8.models.fog.attention import eager_attention
from foundry_fp8.models.fog.norms import RMSNorm
from foundry_fp8.models.mus import SIZES, MusConfig, MusForCausalLM, default_tau
from foundry_fp8.models.mus.residual import branch_for_plain_residual, fixed_residual
from foundry_fp8.surgery.apply import apply_fp8
from tests.models.mus import reference

DIMENSIONS = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


def small(**changes):
    return MusForCausalLM(MusConfig(**{**DIMENSIONS, **changes}))


def randomised(model):
    """Gains differ from 1, so that a missing one is seen."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | RMSNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("final_norm", "qk_norm"), [(True, "none"), (False, "none"), (True, "rms")])
def test_logits_and_gradients_are_those_of_the_equations(activation, attention, final_norm, qk_norm):
    options = {"activation": activation, "tau": 0.3, "final_norm": final_norm, "qk_norm": qk_norm}
    model = randomised(small(**options)).double()
    names = dict(model.named_parameters())
    assert ("model.norm.weight" in names) == final_norm
    assert ("model.layers.1.self_attn.k_norm.weight" in names) == (qk_norm == "rms")
    model.config._attn_implementation = attention
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    ids = torch.randint(0, 96, (2, 12))
    expected = reference.logits(ids, weights, layers=2, heads=4, kv_heads=2, tau=0.3, activation=activation)
    ours = model(ids).logits
    # RoPE and its table are float32 in the model.
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    d_logits = torch.randn_like(expected)
    ours.backward(d_logits), expected.backward(d_logits)
    for name, parameter in model.named_parameters():
        scale = weights[name].grad.abs().max()
        assert (parameter.grad - weights[name].grad).abs().max() < 1e-5 * scale, name


def test_square_root_softmax_is_that_of_the_equations_and_keeps_the_variance_of_independent_values():
    model = randomised(small(tau=0.3, square_root_softmax=True)).double()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    ids = torch.randint(0, 96, (2, 12))
    expected = reference.logits(
        ids, weights, layers=2, heads=4, kv_heads=2, tau=0.3, activation="gelu", square_root=True
    )
    ours = model(ids).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    d_logits = torch.randn_like(expected)
    ours.backward(d_logits), expected.backward(d_logits)
    for name, parameter in model.named_parameters():
        scale = weights[name].grad.abs().max()
        assert (parameter.grad - weights[name].grad).abs().max() < 1e-5 * scale, name

    q, k, v = torch.randn(3, 64, 2, 128, 16)
    for root, expected_std in ((True, 1.0), (False, (math.e / 128) ** 0.5)):
        model.model.layers[0].self_attn.square_root = root
        out, _ = eager_attention(model.model.layers[0].self_attn, q, k, v, None, scaling=0.25)
        assert float(out.std()) == pytest.approx(expected_std, rel=0.05)


def test_square_root_softmax_is_kept_by_a_checkpoint_and_by_its_cache(tmp_path):
    model = small(square_root_softmax=True).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 96, (2, 12))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert (loaded(ids).logits - small().eval()(ids).logits).abs().max() > 1e-3
    found = [
        loaded.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*found)


def test_a_checkpoint_keeps_its_final_norm_and_one_from_before_has_none(tmp_path):
    for name, model in (("with", randomised(small())), ("without", small(final_norm=False))):
        model.eval().save_pretrained(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        if name == "without":
            del config["final_norm"]  # as it was before there was the key
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        ids = torch.randint(0, 96, (2, 12))
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert loaded.config.final_norm == (name == "with")


def test_the_residual_keeps_variance_and_has_two_equal_forms():
    stream, branch = torch.randn(2, 400, 64).double(), torch.randn(2, 400, 64).double()
    for tau in (0.05, 0.4, 0.9):
        mixed = fixed_residual(stream, branch, tau)
        assert float(mixed.std()) == pytest.approx(1, rel=0.02)
        torch.testing.assert_close(mixed, stream + branch_for_plain_residual(stream, branch, tau))


@pytest.mark.parametrize("width", [64, 256])
def test_everything_starts_at_unit_scale_whatever_the_width(width):
    model = small(hidden_size=width, num_attention_heads=width // 16, num_hidden_layers=4)
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, UnitLinear):
            module.register_forward_hook(lambda m, i, o, name=name: seen.update({name: (i[0], o)}))
    with torch.no_grad():
        states = model(torch.randint(0, 96, (4, 64)), output_hidden_states=True).hidden_states
    for state in states:
        assert float(state.std()) == pytest.approx(1, rel=0.12)
    for name, (_, output) in seen.items():
        if name.endswith(("qkv_proj", "up_proj")):
            assert float(output.std()) == pytest.approx(1, rel=0.15), name
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert float(parameter.detach().std()) == pytest.approx(1, rel=0.05), name
    assert float(seen["lm_head"][1].std()) == pytest.approx(width**-0.5, rel=0.2)


def test_it_saves_loads_and_generates_with_a_cache(tmp_path):
    model = randomised(small(tau=0.25)).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, MusForCausalLM) and loaded.config.tau == 0.25
    assert isinstance(loaded.lm_head, UnitLinear)
    ids = torch.randint(0, 96, (2, 12))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    with_cache = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    without = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(with_cache, without)


def test_a_resized_head_keeps_its_multiplier():
    model = small()
    ids = torch.randint(0, 96, (1, 8))
    before = model(ids).logits
    model.resize_token_embeddings(128)
    assert model.lm_head.output_multiplier == 1 / 64 and model.lm_head.weight.shape == (128, 64)
    torch.testing.assert_close(model(ids).logits[..., :96], before)


def test_lora_merges_rightly_and_runs_beside_fp8():
    from peft import LoraConfig, get_peft_model

    from foundry_fp8.models.mus.adapters import use_unit_lora

    config = use_unit_lora(LoraConfig(target_modules=["qkv_proj", "down_proj"], r=4))
    model = get_peft_model(small(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    report = apply_fp8(model, recipe={"name": "unit", "gradient_scale": 1024})
    assert len(report.converted) == 8 and all("lora" in name or "head" in name for name in report.skipped)
    ids = torch.randint(0, 96, (2, 16))
    model(ids).logits.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora" in n)
    model.eval()
    apart = model(ids).logits
    torch.testing.assert_close(model.merge_and_unload()(ids).logits, apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size, billions", [("1b", 1.62), ("3b", 3.03), ("7b", 7.26), ("13b", 13.61)])
def test_the_papers_sizes(size, billions):
    config = MusConfig(size=size)
    with torch.device("meta"):
        count = sum(p.numel() for p in MusForCausalLM(config).parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.02)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == SIZES[size]
    assert config.intermediate_size == 4 * config.hidden_size


def test_tau_falls_with_depth_through_the_papers_two_values():
    assert default_tau(4) == default_tau(2) == 0.4 and default_tau(100) == 0.1
    taus = [default_tau(layers) for layers in (4, 12, 24, 32, 40, 100)]
    assert taus == sorted(taus, reverse=True)
    assert math.log(default_tau(20) / 0.4) == pytest.approx(
        math.log(0.25) * math.log(5) / math.log(25), rel=1e-3
    )
    assert MusConfig(size="1b").tau == default_tau(24) and MusConfig(size="1b", tau=0.3).tau == 0.3


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tau": 0.0}, r"model\.tau: 0\.0"),
        ({"tau": 1.5}, r"model\.tau: 1\.5"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: true cannot be µnit-scaled"),
        ({"num_attention_heads": 3}, "num_attention_heads: 3 does not divide"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"num_hidden_layers": None}, "num_hidden_layers: missing"),
        ({"activation": "swiglu"}, "activation"),
        ({"size": "2b"}, "size"),
    ],
)
def test_bad_configuration_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        MusConfig(**{**DIMENSIONS, **changes})
