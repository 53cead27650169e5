"""Kurtosis: the formula on tensors whose answer is known, the taps, and the callback in real runs."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers

from foundry_fp8.config import ConfigError
from foundry_fp8.observe.kurtosis import kurtosis_per_sample, kurtosis_per_token, row_sums
from foundry_fp8.observe.kurtosis_meter import KurtosisMeter
from foundry_fp8.observe.kurtosis_taps import ROLES, find_taps
from tests.callbacks.conftest import batches, build_llama, series
from tests.model_zoo import TRANSFORMERS_4


def both(x):
    sums = row_sums(x, 2)
    return float(kurtosis_per_token(*sums)), float(kurtosis_per_sample(*sums))


def reference(x):
    """float64, from the definition."""
    x = x.double()
    token = ((x**4).mean(-1) / (x**2).mean(-1) ** 2).mean()
    flat = x.flatten(1)
    return float(token), float(((flat**4).mean(-1) / (flat**2).mean(-1) ** 2).mean())


def test_known_values():
    torch.manual_seed(0)
    gaussian = torch.randn(4, 256, 512)
    assert both(gaussian) == pytest.approx((3.0, 3.0), abs=0.05)
    one_hot = torch.zeros(2, 8, 64)
    one_hot[..., 5] = 7.0
    assert both(one_hot) == pytest.approx((64.0, 64.0))
    assert both(torch.full((2, 4, 16), -3.0)) == pytest.approx((1.0, 1.0))


def test_a_token_that_sticks_out_is_seen_per_sample_and_a_channel_by_both():
    torch.manual_seed(0)
    x = torch.randn(2, 512, 512)
    token, channel = x.clone(), x.clone()
    token[:, 3] *= 50
    channel[..., 3] *= 50
    assert both(token)[0] == pytest.approx(3.0, abs=0.05)
    # K = D S sum(m4) / sum(m2)^2 with Gaussian moments: one of n rows (or columns) has 50^2 and 50^4 times the others'.
    n = 512
    stuck_out = 3 * n * (n - 1 + 50**4) / (n - 1 + 50**2) ** 2
    assert stuck_out == pytest.approx(1059, abs=1)
    assert both(token)[1] == pytest.approx(stuck_out, rel=0.1)
    assert both(channel)[1] > 1000
    assert both(channel) == pytest.approx(reference(channel), rel=1e-4)
    assert both(channel)[0] > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_moments_are_float32_whatever_the_dtype(dtype, scale):
    torch.manual_seed(0)
    x = (torch.randn(3, 20, 48) * torch.logspace(-1, 1, 48) * scale).to(dtype)
    assert both(x) == pytest.approx(reference(x), rel=1e-5)


def test_zero_tokens_are_left_out_and_nan_is_not():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 32)
    padded = torch.cat([x, torch.zeros(2, 3, 32)], dim=1)
    assert both(padded)[0] == pytest.approx(both(x)[0])
    x[0, 0, 0] = torch.nan
    assert all(value != value for value in both(x))


def build(name):
    if name in ("mpt", "mpt_glu"):
        from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

        ffn = {"ffn_config": {"ffn_type": "mptglu"}} if name == "mpt_glu" else {}
        return MPTForCausalLM(MPTConfig(
            d_model=32, n_heads=4, n_layers=2, max_seq_len=16, vocab_size=64, loss_fn="torch_crossentropy",
            attn_config={"attn_impl": "torch", "attn_type": "grouped_query_attention", "kv_n_heads": 2, "qk_ln": name == "mpt_glu"},
            **ffn,
        ))  # fmt: skip
    if name == "llama":
        return build_llama()
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 64, "attn_implementation": "eager"}  # fmt: skip
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**small | {"head_dim": 8}))
    return MixtralForCausalLM(MixtralConfig(**small, num_local_experts=2, num_experts_per_tok=1))


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "mpt", "mpt_glu"])
def test_every_role_is_found_in_every_block(name):
    if name == "mixtral" and not TRANSFORMERS_4:
        pytest.skip("transformers 5 keeps experts in one parameter, whose products have no modules to watch")
    taps = find_taps(build(name))
    assert {(tap.role, tap.layer) for tap in taps} == {(role, layer) for role in ROLES for layer in (0, 1)}
    ends = {tap.role: tap.name.rpartition(".")[2] for tap in taps if tap.layer == 0}
    if name == "qwen3":
        assert (ends["q"], ends["k"]) == ("q_norm", "k_norm")
    if name == "mpt_glu":
        assert (ends["q"], ends["k"]) == ("q_ln", "k_ln")


def test_unknown_models_and_patterns_are_refused():
    with pytest.raises(ConfigError, match=r"neither blocks nor linears"):
        find_taps(torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1)), key="callbacks.kurtosis_monitor")
    with pytest.raises(ConfigError, match=r"tensors.mine: pattern '\*.nothing' matches none"):
        find_taps(build_llama(), tensors={"mine": ["*.nothing"]})
    with pytest.raises(ConfigError, match="write @input or @output"):
        find_taps(build_llama(), tensors={"mine": ["*.mlp@inside"]})


def expected_from_forward(model, ids):
    """The residual, QKV and FC2 tensors of the first batch, recomputed with plain hooks and float64."""
    seen = {}
    handles = []
    for layer, block in enumerate(model.model.layers):
        attention, mlp = block.self_attn, block.mlp
        handles.append(
            block.register_forward_hook(lambda m, a, o, i=layer: seen.__setitem__(("residual", i), o[0]))
        )
        handles.append(attention.q_proj.register_forward_hook(
            lambda m, a, o, i=layer: seen.update({("qkv_input", i): a[0], ("q", i): o})))  # fmt: skip
        handles.append(
            attention.k_proj.register_forward_hook(lambda m, a, o, i=layer: seen.__setitem__(("k", i), o))
        )
        handles.append(
            attention.v_proj.register_forward_hook(lambda m, a, o, i=layer: seen.__setitem__(("v", i), o))
        )
        handles.append(mlp.down_proj.register_forward_hook(
            lambda m, a, o, i=layer: seen.update({("fc2_input", i): a[0], ("fc2_output", i): o})))  # fmt: skip
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    for layer in range(len(model.model.layers)):
        parts = [seen[part, layer] for part in ("q", "k")] + [seen.pop(("v", layer))]
        seen["qkv_output", layer] = torch.cat(parts, dim=-1)
    return {where: reference(tensor) for where, tensor in seen.items()}


@pytest.mark.integration
@pytest.mark.parametrize("microbatch", [4, 2])
def test_what_is_logged_is_what_the_tensors_say(train, microbatch):
    from foundry_fp8.callbacks.kurtosis_monitor import KurtosisMonitor

    model = build_llama()
    ids = torch.stack([row["input_ids"] for row in batches(1)])
    expected = expected_from_forward(model, ids)
    monitor = KurtosisMonitor(interval=1, details=True)
    trainer = train(model, [monitor], steps=1, device_train_microbatch_size=microbatch)
    for (role, layer), (token, sample) in expected.items():
        assert series(trainer, f"kurtosis_token/{role}/layer_{layer:03d}") == pytest.approx([token], rel=1e-4)
        assert series(trainer, f"kurtosis_sample/{role}/layer_{layer:03d}") == pytest.approx(
            [sample], rel=1e-4
        )
    for role in ROLES:
        layers = [series(trainer, f"kurtosis_token/{role}/layer_{layer:03d}")[0] for layer in (0, 1)]
        assert series(trainer, f"kurtosis_token/{role}/mean") == pytest.approx([sum(layers) / 2])
        assert series(trainer, f"kurtosis_token/{role}/worst") == pytest.approx([max(layers)])


@pytest.mark.full
@pytest.mark.integration
def test_attention_operands_are_seen_where_attention_runs_fp8(train):
    """On a Llama: within FP8's rounding of what they are without."""
    from foundry_fp8.algorithms.fp8 import FP8
    from foundry_fp8.callbacks.kurtosis_monitor import KurtosisMonitor

    model = build_llama()
    expected = expected_from_forward(model, torch.stack([row["input_ids"] for row in batches(1)]))
    fp8 = FP8(recipe="current", attention=True)
    trainer = train(model, [KurtosisMonitor(interval=1, details=True)], algorithms=[fp8], steps=1)
    for role in ("q", "k", "qkv_output"):
        for layer in (0, 1):
            found = series(trainer, f"kurtosis_token/{role}/layer_{layer:03d}")
            assert found == pytest.approx([expected[role, layer][0]], rel=0.2)
            assert found != pytest.approx([expected[role, layer][0]], rel=1e-6)


@pytest.mark.integration
def test_interval_gradients_checkpointing_and_user_tensors(train):
    from foundry_fp8.algorithms.fp8 import FP8
    from foundry_fp8.callbacks.kurtosis_monitor import KurtosisMonitor

    options = {
        "interval": 2,
        "details": True,
        "gradients": True,
        "tensors": {"mine": ["*.down_proj@input", "model.lm_head"]},
    }
    plain, checkpointed = build_llama(), build_llama()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    first = train(plain, [KurtosisMonitor(**options)], algorithms=[FP8(recipe="delayed")], steps=5)
    again = train(checkpointed, [KurtosisMonitor(**options)], algorithms=[FP8(recipe="delayed")], steps=5)
    keys = {key for key in first.logged.data if key.startswith("kurtosis_")}
    assert keys == {key for key in again.logged.data if key.startswith("kurtosis_")}
    for key in keys:
        assert len(series(first, key)) == 2
        assert series(first, key) == pytest.approx(series(again, key), rel=1e-6)
    assert {"kurtosis_token/residual_grad/layer_000", "kurtosis_token/mine/outside"} <= keys
    assert not any("fc2_input_grad" in key for key in keys)
    assert series(first, "kurtosis_token/mine/layer_001") == pytest.approx(
        series(first, "kurtosis_token/fc2_input/layer_001")
    )


@pytest.mark.integration
def test_a_pattern_that_matches_nothing_stops_the_run_before_it_starts(train):
    from foundry_fp8.callbacks.kurtosis_monitor import KurtosisMonitor

    with pytest.raises(ConfigError, match="matches none of the model's"):
        train(build_llama(), [KurtosisMonitor(tensors={"x": ["*.dwn_proj"]})], steps=1)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
OTHERS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
    "mlp": lambda: torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 64)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_any_model_is_watched_without_a_preset(name):
    torch.manual_seed(0)
    model = OTHERS[name]().train()
    meter, seen = KurtosisMeter(model, interval=1), {}
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) or hasattr(m, "nx")]
    for where, module in linears:
        module.register_forward_hook(
            lambda m, args, y, where=where: seen.update({where: args[0].detach().double()})
        )
    ids = torch.randint(3, 64, (2, 8))
    meter.begin(0)
    model(ids)
    metrics, details = meter.end()
    expected = sorted(float((x**4).mean(-1).div((x**2).mean(-1) ** 2).mean()) for x in seen.values())
    found = sorted(
        v
        for key, v in details.items()
        if key.startswith("kurtosis_token/") and "_input/" in key and "/mean" not in key
    )
    assert found == pytest.approx(expected, rel=1e-3) and len(found) == len(linears)
    assert ("kurtosis_token/residual/worst" in metrics) == (name != "mlp")
    assert not [tap for tap in find_taps(model) if tap.role == "residual" and tap.side == "input"]


def test_roles_that_are_asked_for_leave_the_others_out():
    meter = KurtosisMeter(OTHERS["gpt2"](), roles=["residual"])
    assert {tap.role for tap in meter._taps} == {"residual"}


@pytest.mark.parametrize("how", ["keywords", "a mapping"])
@pytest.mark.parametrize("pads", [2, 12])
def test_padding_does_not_count(how, pads):
    model = build_llama(attn_implementation="eager")
    host = model if how == "keywords" else Taking(model)
    ids = torch.randint(3, 64, (3, 16), generator=torch.Generator().manual_seed(0))
    model.model.embed_tokens.weight.data[0, 0] = 100.0  # padding's
    mask = torch.ones_like(ids)
    mask[:, 16 - pads :] = 0
    found = []
    for given in ({"input_ids": ids[:, : 16 - pads], "attention_mask": mask[:, : 16 - pads]},
                  {"input_ids": ids * mask, "attention_mask": mask}):  # fmt: skip
        meter = KurtosisMeter(host, interval=1, gradients=True)
        meter.begin(0)
        (host(**given) if how == "keywords" else host(given)).logits[
            :, : 16 - pads
        ].square().mean().backward()
        found.append(meter.end()[1])
    short, padded = found
    assert short.keys() == padded.keys() and padded == pytest.approx(short, rel=1e-4)


class Taking(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(**batch)


def test_what_peft_adapts_has_one_tap():
    """A pattern of modules means the adapted layer, and not in it the one that it had before too."""
    model, down = build_llama(), ["*.down_proj@input"]
    plain = find_taps(model, tensors={"down": down})
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    taps = find_taps(adapted, tensors={"down": down})
    assert [tap.role for tap in taps if tap.role == "down"] == [
        tap.role for tap in plain if tap.role == "down"
    ]
