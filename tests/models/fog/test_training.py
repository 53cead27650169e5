"""Every variant through LLM Foundry's own train entry: FP8 and FP8DPA, saving, resuming, MPT with FOG's parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foundry_fp8.config import ConfigError
from foundry_fp8.models.fog import VARIANTS
from foundry_fp8.surgery.attention import FP8AttentionState
from tests.integration.foundry_runs import MPT, SEQ, VOCAB, config, make_data, train

pytestmark = pytest.mark.integration

RECIPE = {"name": "delayed", "amax_history_len": 16}


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    return make_data(tmp_path_factory.mktemp("fog"))


def fog(variant: str, **kwargs: Any) -> dict[str, Any]:
    return {
        "name": "fog_causal_lm",
        "variant": variant,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **kwargs,
    }


def optimizer() -> dict[str, Any]:
    return {
        "name": "decoupled_adamw",
        "lr": 3.0e-3,
        "weight_decay": 3.0e-4,
        "param_groups": [{"param_str_match": r"norm\.|scale\.|\.act\.|\.alpha$", "weight_decay": 0.0}],
    }


def fp8(attention: bool) -> dict[str, Any]:
    return {"fp8": {"recipe": dict(RECIPE), "attention": attention}}


QUICK = (("fog-max", True), ("op1", False))
"""What every landing trains, with and without FP8 attention; the other variants are in the full tier."""


@pytest.mark.parametrize(
    ("variant", "attention"),
    [
        pytest.param(
            variant,
            attention,
            id=f"{variant}-{'fp8dpa' if attention else 'fp8'}",
            marks=[] if (variant, attention) in QUICK else pytest.mark.full,
        )
        for variant in VARIANTS
        for attention in (False, True)
    ],
)
def test_every_variant_trains_saves_and_generates(
    variant: str, attention: bool, root: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    cfg = config(
        root,
        model=fog(variant),
        algorithms=fp8(attention),
        optimizer=optimizer(),
        scheduler={"name": "wsd", "t_warmup": "1ba", "alpha_f": 0.1},
        max_duration="6ba",
    )
    trainer = train(cfg)
    assert trainer.state.total_loss_dict["loss/train/total"] < 6.1  # ln(512) = 6.24: it learns
    wrapped = trainer.state.model
    report = trainer.state.algorithms[0].report
    assert len(report.converted) == 8 and list(report.skipped) == ["model.lm_head"]
    assert [row.action for row in report.attention] == ["converted"] * 2 * attention
    linears = [wrapped.get_submodule(name) for name in report.converted]
    assert all(linear.ledger.calls["wgrad", "fp8"] == 24 for linear in linears)  # 6 batches of 4 microbatches
    state = FP8AttentionState.of(wrapped)
    assert (state is not None) == attention
    if state is not None:
        assert (state.delayed.amax_history.amax(0) > 0).all()

    # 1-D parameters take no decay, matrices do.
    decays = {
        p.dim(): group["weight_decay"]
        for group in trainer.state.optimizers[0].param_groups
        for p in group["params"]
    }
    assert decays[2] == 3.0e-4 and decays.get(1, 0.0) == 0.0

    model = wrapped.model.eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(24).view(2, 12) * 7 % 257
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    texts = [m.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (loaded, model)]
    assert texts[0].shape == (2, 17) and torch.equal(*texts)


def test_the_monitors_read_fog(root: Path) -> None:
    """FLOPs by hand from the dimensions; kurtosis of the residual stream measured again in high precision."""
    trainer = train(
        config(
            root,
            model=fog("fog-max"),
            algorithms=fp8(attention=True),
            optimizer={"name": "decoupled_adamw", "lr": 1.0e-30},
            device_train_microbatch_size=8,
            callbacks={
                "mfu_monitor": {
                    "details": True,
                    "interval": 1,
                    "peak_flops": {"fp8": 2e12, "bf16": 1e12, "fp32": 1e12},
                },
                "kurtosis_monitor": {"interval": 1, "details": True},
            },
            loggers={"inmemory": {}},
        )
    )
    logged = trainer.logger.destinations[0].data
    last = {
        key: float(values[-1][1]) for key, values in logged.items() if key.startswith(("mfu/", "kurtosis_"))
    }

    d, layers, vocab, tokens = 64, 2, 384, 8 * SEQ
    matrices = d * (4 + 2 * 2) * 16 + d * d + 2 * d * 6 * d
    attention = 2 * 2 * d * 8 * SEQ * (SEQ + 1) // 2  # two GEMMs over the causal pairs of 8 sequences
    in_fp8 = 3 * layers * (2 * matrices * tokens + attention)  # forward and twice that in backward
    assert last["mfu/fp8_flop_fraction"] == pytest.approx(in_fp8 / (in_fp8 + 3 * 2 * d * vocab * tokens))
    assert last["mfu/mfu"] > 0

    model = trainer.state.model.model.eval()
    with torch.no_grad():
        states = model(trainer.state.batch["input_ids"], output_hidden_states=True).hidden_states
    for layer, state in enumerate(states[1:]):
        x = state.double()
        by_token = (x**4).mean(-1) / (x**2).mean(-1) ** 2
        by_sample = (x**4).mean((1, 2)) / (x**2).mean((1, 2)) ** 2
        # 1 % is room for the rounding of the run; the two kinds differ by more than that.
        for kind, value in (("token", by_token), ("sample", by_sample)):
            key = f"kurtosis_{kind}/residual/layer_{layer:03d}"
            assert last[key] == pytest.approx(float(value.mean()), rel=0.01)


@pytest.mark.full
def test_fp8_with_and_without_attention_stay_near_high_precision(root: Path) -> None:
    def loss(algorithms: dict[str, Any] | None) -> float:
        trainer = train(
            config(
                root, model=fog("fog-max"), algorithms=algorithms, optimizer=optimizer(), max_duration="10ba"
            )
        )
        return float(trainer.state.total_loss_dict["loss/train/total"])

    exact, linears, both = loss(None), loss(fp8(attention=False)), loss(fp8(attention=True))
    assert exact < 5.9
    assert len({exact, linears, both}) == 3
    assert abs(linears / exact - 1) < 0.03 and abs(both / exact - 1) < 0.03


def test_a_resumed_fp8dpa_run_ends_bit_exactly_like_an_uninterrupted_one(root: Path, tmp_path: Path) -> None:
    base = dict(model=fog("fog-flash"), algorithms=fp8(attention=True), optimizer=optimizer())
    whole = train(config(root, **base, save_folder=str(tmp_path / "a"), save_interval="2ba"))
    resumed = train(config(root, **base, load_path=str(tmp_path / "a" / "ep0-ba2-rank0.pt")))
    expected = dict(whole.state.model.named_parameters())
    for name, value in resumed.state.model.named_parameters():
        assert torch.equal(value, expected[name]), name


def test_hugging_face_checkpoints_of_foundry_load(root: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = train(
        config(
            root,
            model=fog("fog-opt", tie_word_embeddings=True),
            algorithms=fp8(attention=True),
            max_duration="2ba",
            callbacks={
                "hf_checkpointer": {
                    "save_folder": str(tmp_path),
                    "save_interval": "2ba",
                    "precision": "float32",
                    "overwrite": True,
                }
            },
        )
    )
    (folder,) = (tmp_path / "huggingface").iterdir()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(ids).logits, trainer.state.model.model.eval()(ids).logits)


def test_mpt_takes_fogs_parts(root: Path) -> None:
    model = {
        **MPT,
        "norm_type": "no_norm",
        "attn_config": {
            "attn_type": "fog_attention",
            "attn_impl": "torch",
            "kv_n_heads": 2,
            "qk_norm": "tanh",
            "post_norm_gain": 0.5,
            "rope": True,
            "rope_impl": "hf",
        },
        "ffn_config": {"ffn_type": "fog_ffn", "ffn_act": "xielu", "post_norm_gain": 0.5},
    }
    trainer = train(config(root, model=model, algorithms=fp8(attention=True), max_duration="12ba"))
    block = trainer.state.model.model.transformer.blocks[0]
    assert (
        type(block.attn).__name__ == "FogMPTAttention"
        and block.attn.attn_fn.fp8.ledger.calls["fprop", "fp8"] > 0
    )
    assert not list(block.norm_1.parameters()) and abs(float(block.attn.post_norm.weight.mean()) - 0.5) < 0.05
    assert float(block.ffn.act.p) != 0.0
    assert trainer.state.total_loss_dict["loss/train/total"] < 6.2  # ln(512) = 6.24

    smooth = {**MPT, "ffn_config": {"ffn_type": "smooth_swiglu"}}
    trainer = train(config(root, model=smooth, algorithms=fp8(attention=False), max_duration="2ba"))
    assert len(trainer.state.algorithms[0].report.converted) == 10


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (fog("fog-max", layers=3), r"model\.layers: unknown key.*Did you mean"),
        (fog("fog-maximal"), r"model\.variant: 'fog-maximal'.*Did you mean 'fog-max'"),
        (fog("fog-max", qk_norm="tanh"), r"model\.qk_norm: 'tanh' contradicts variant=fog-max"),
    ],
)
def test_a_bad_model_fails_before_training(model: dict[str, Any], message: str, root: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train(config(root, model=model))


LORA_TARGETS = ("qkv_proj", "o_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param(None, id="hp", marks=pytest.mark.full),
        pytest.param(False, id="fp8", marks=pytest.mark.full),
        pytest.param(True, id="fp8dpa"),
    ],
)
def test_lora_trains_its_adapters_alone_and_merges(attention: bool | None, root: Path) -> None:
    lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 16, "target_modules": list(LORA_TARGETS)}
    cfg = config(
        root,
        model=fog("fog-max", peft_config=lora),
        algorithms=None if attention is None else fp8(attention),
        optimizer={"name": "decoupled_adamw", "lr": 1.0e-2},
    )
    trainer = train(cfg)
    model = trainer.state.model.model.eval()
    assert model.config.vocab_size == 384 != VOCAB  # 257 tokens, rounded up to 128
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 4 * 2 and all("lora_" in name for name in trained)
    if attention is not None:
        for block, layer in enumerate(model.base_model.model.model.layers):
            for name in LORA_TARGETS:
                parent = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
                # 4 batches of 4 microbatches. A frozen weight has no wgrad; below the first GEMM nothing trains.
                calls = {("fprop", "fp8"): 16, ("dgrad", "fp8"): 16}
                if (block, name) == (0, "qkv_proj"):
                    del calls["dgrad", "fp8"]
                assert dict(getattr(parent, name).base_layer.ledger.calls) == calls, (block, name)
        assert len(trainer.state.algorithms[0].report.attention) == 2 * attention

    ids = torch.arange(12)[None]
    adapted = model(ids).logits
    with model.disable_adapter():
        assert (model(ids).logits - adapted).abs().max() > 0.1
    merged = model.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_meta_initialisation_and_wrapping_are_foundrys(tied: bool) -> None:
    """What FSDP does on a GPU, done here on the CPU: materialise each module, then call the model's own initialisation."""
    from foundry_fp8.models.fog.causal_lm import ComposerFogCausalLM
    from foundry_fp8.models.fog.modeling import FogBlock
    from foundry_fp8.surgery.apply import apply_fp8

    kwargs = {
        k: v for k, v in fog("fog-flash", tie_word_embeddings=tied, vocab_size=64).items() if k != "name"
    }
    model = ComposerFogCausalLM(None, init_device="meta", use_train_metrics=False, **kwargs)
    apply_fp8(model, recipe="delayed", attention=True)
    assert all(p.is_meta for p in model.parameters())
    wrapped = [m for m in model.model.modules() if model.model.fsdp_wrap_fn(m)]
    assert [type(m) for m in wrapped] == [FogBlock] * 2
    for module in model.model.modules():
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            torch.nn.init.constant_(parameter, torch.nan)
        model.model.param_init_fn(module)
    if tied:
        model.model.tie_weights()
    sigma = model.model.config.initializer_range
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        if parameter.dim() > 1:  # the mark of the branch's end survives the conversion
            std = sigma / 2 if ("o_proj" in name or "down_proj" in name) else sigma
            assert float(parameter.std()) == pytest.approx(std, rel=0.1), name
