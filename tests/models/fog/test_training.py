"""Every variant through LLM Foundry's own train entry: FP8 and FP8DPA, saving, resuming, MPT with FOG's parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foundry_fp8.attention_surgery import FP8AttentionState
from foundry_fp8.config import ConfigError
from foundry_fp8.models.fog import VARIANTS
from tests.integration.foundry_runs import MPT, VOCAB, config, make_data, train

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


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_in_fp8dpa_saves_and_generates(variant: str, root: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    cfg = config(
        root,
        model=fog(variant),
        algorithms=fp8(attention=True),
        optimizer=optimizer(),
        scheduler={"name": "wsd", "t_warmup": "1ba", "alpha_f": 0.1},
        max_duration="6ba",
    )
    trainer = train(cfg)
    assert trainer.state.total_loss_dict["loss/train/total"] < 6.1  # ln(512) = 6.24: it learns
    report = trainer.state.algorithms[0].report
    assert len(report.converted) == 8 and list(report.skipped) == ["model.lm_head"]
    assert [row.action for row in report.attention] == ["converted"] * 2
    state = FP8AttentionState.of(trainer.state.model)
    assert state is not None and (state.delayed.amax_history.amax(0) > 0).all()

    # 1-D parameters take no decay, matrices do.
    model = trainer.state.model.model
    decays = {
        p.dim(): group["weight_decay"]
        for group in trainer.state.optimizers[0].param_groups
        for p in group["params"]
    }
    assert decays[2] == 3.0e-4 and decays.get(1, 0.0) == 0.0

    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(24).view(2, 12) * 7 % 257
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    generated = loaded.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert generated.shape == (2, 17)


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


def test_peft_and_vocabulary(root: Path) -> None:
    model = fog(
        "fog-max",
        peft_config={
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": 4,
            "target_modules": ["qkv_proj", "o_proj", "up_proj", "down_proj"],
        },
    )
    pytest.importorskip("peft", reason="PEFT is not installed")
    trainer = train(config(root, model=model, algorithms=None, max_duration="2ba"))
    trained = [n for n, p in trainer.state.model.named_parameters() if p.requires_grad]
    assert trained and all("lora" in n for n in trained)
    assert trainer.state.model.model.config.vocab_size == 384 != VOCAB  # 257 tokens, rounded up to 128


@pytest.mark.parametrize("tied", [False, True])
def test_meta_initialisation_and_wrapping_are_foundrys(tied: bool) -> None:
    """What FSDP does on a GPU, done here on the CPU: materialise each module, then call the model's own initialisation."""
    from foundry_fp8.algorithms.fp8 import apply_fp8
    from foundry_fp8.models.fog.causal_lm import ComposerFogCausalLM
    from foundry_fp8.models.fog.modeling import FogBlock

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
