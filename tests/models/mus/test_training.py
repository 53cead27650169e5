"""Both forms of a µnit-scaled model through LLM Foundry's own train entry: FP8, learning rates, resuming, refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Event, Precision
from composer.loggers import Logger
from typer.testing import CliRunner

from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.cli.main import app
from foundry_fp8.config import ConfigError
from tests.export.served import emulated, load
from tests.integration.foundry_runs import MPT, SEQ, config, make_data, train

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings(
        "ignore:The `dict` method is deprecated"
    ),  # transformers, of compressed-tensors
]

ROPE = {"rope": True, "rope_impl": "hf"}
MODELS: dict[str, dict[str, Any]] = {
    "mus_causal_lm": {
        "name": "mus_causal_lm",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
    },
    "mpt": {
        **MPT,
        "learned_pos_emb": False,
        "tie_word_embeddings": False,
        "logit_scale": 1 / 64,
        "norm_type": "mus_norm",
        "fc_type": {"name": "unit"},
        "init_config": {"name": "unit_normal_"},
        "attn_config": {
            "attn_type": "mus_attention",
            "attn_impl": "torch",
            "kv_n_heads": 2,
            "tau": 0.4,
            **ROPE,
        },
        "ffn_config": {"ffn_type": "mus_ffn", "ffn_act": "gelu", "tau": 0.4},
    },
}
MODELS["mpt_qk_gn"] = {
    **MODELS["mpt"],
    "attn_config": {**MODELS["mpt"]["attn_config"], "qk_gn": True},
}
ALGORITHMS = {"fp8": {"recipe": "unit"}, "unit_scaling": {"base_width": 16}}
LION = {"name": "decoupled_lionw", "lr": 0.08, "betas": [0.9, 0.95], "weight_decay": 1e-5}


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    return make_data(tmp_path_factory.mktemp("mus"))


def run(root: Path, kind: str, model: dict[str, Any] | None = None, **changes: Any) -> Any:
    base = {"algorithms": ALGORITHMS, "optimizer": LION, "max_duration": "6ba", **changes}
    return train(config(root, model={**MODELS[kind], **(model or {})}, **base))


@pytest.mark.parametrize(
    "kind",
    [
        "mpt",
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("mus_causal_lm", "mpt_qk_gn")),
    ],
)
def test_it_trains_in_fp8_and_resumes_bit_exactly(kind: str, root: Path, tmp_path: Path) -> None:
    whole = run(root, kind, save_folder=str(tmp_path / "a"), save_interval="3ba")
    state = whole.state
    assert state.total_loss_dict["loss/train/total"] < 6.1  # ln(512) = 6.24: it learns
    fp8 = state.algorithms[0]
    assert len(fp8.report.converted) == 8 and "lm_head" in "".join(fp8.report.skipped)
    layers = [state.model.get_submodule(name) for name in fp8.report.converted]
    assert all(layer.ledger.calls["wgrad", "fp8"] == 24 for layer in layers)  # 6 batches of 4 microbatches
    assert {layer.recipe.gradient_scale for layer in layers} == {2**15}  # 8 x 64 tokens x width 64
    hidden, other = (
        {g["lr"] for g in state.optimizers[0].param_groups if g["unit_scaling"] == mark}
        for mark in ("hidden", "other")
    )
    assert (hidden, other) == ({0.04}, {0.08})  # sqrt(16 / 64)

    exported = CliRunner().invoke(
        app, ["export", str(tmp_path / "a" / "ep0-ba6-rank0.pt"), str(tmp_path / "served")]
    )
    assert exported.exit_code == 0 and "bit for bit" in exported.output, exported.output
    ids = torch.arange(2 * SEQ).view(2, SEQ) % 257
    for layer in layers:
        layer.evaluate = "fp8"
    with torch.no_grad():
        logits = state.model.model.eval()(ids).logits
    assert torch.equal(served_logits(tmp_path / "served", kind, ids), logits)

    resumed = run(root, kind, load_path=str(tmp_path / "a" / "ep0-ba3-rank0.pt"))
    expected = dict(state.model.named_parameters())
    for name, value in resumed.state.model.named_parameters():
        assert torch.equal(value, expected[name]), name

    with pytest.raises(RuntimeError, match="was trained with base_width 16, this run has 32"):
        run(
            root,
            kind,
            algorithms={**ALGORITHMS, "unit_scaling": {"base_width": 32}},
            load_path=str(tmp_path / "a" / "ep0-ba3-rank0.pt"),
        )


def served_logits(folder: Path, kind: str, ids: torch.Tensor) -> torch.Tensor:
    from llmfoundry.models.mpt import MPTForCausalLM

    from foundry_fp8.models.mus import MusForCausalLM

    model, names = emulated(load(folder, MusForCausalLM if kind == "mus_causal_lm" else MPTForCausalLM))
    assert len(names) == 8
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def test_added_on_resume_it_asks_for_an_optimizer_without_the_old_groups(root: Path, tmp_path: Path) -> None:
    """An older checkpoint's one group, and its scheduler's one rate, are not the algorithm's two."""
    kind, short = "mus_causal_lm", {"max_duration": "2ba"}
    run(root, kind, algorithms={}, save_folder=str(tmp_path), save_interval="1ba", **short).close()
    load = {
        "load_path": str(tmp_path / "ep0-ba1-rank0.pt"),
        "algorithms": {"unit_scaling": {"base_width": 16}},
        **short,
    }
    with pytest.raises(RuntimeError, match=r"load_ignore_keys: \[state/optimizers, state/schedulers\]"):
        run(root, kind, **load)
    resumed = run(root, kind, **load, load_ignore_keys=["state/optimizers", "state/schedulers"])
    rates = {g["unit_scaling"]: g["lr"] for g in resumed.state.optimizers[0].param_groups}
    assert rates == {"hidden": 0.04, "other": 0.08} and int(resumed.state.timestamp.batch) == 2


@pytest.mark.parametrize(
    "kind, off",
    [
        ("mpt", {"norm_type": "no_norm"}),
        pytest.param("mus_causal_lm", {"final_norm": False}, marks=pytest.mark.full),
    ],
)
def test_a_run_from_before_the_final_norm_resumes_and_is_exported_by_the_option(
    kind: str, off: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    from foundry_fp8.cli.composer_checkpoint import read_checkpoint

    short = {"max_duration": "2ba"}
    run(root, kind, off, save_folder=str(tmp_path), save_interval="1ba", **short).close()
    path = tmp_path / "ep0-ba1-rank0.pt"
    saved = torch.load(path, weights_only=False)
    saved["state"]["integrations"]["huggingface"]["model"]["config"]["content"].pop("final_norm", None)
    del dict(saved["state"]["algorithms"])["UnitScaling"]["final_norm"]
    torch.save(saved, path)

    with pytest.raises(RuntimeError, match=r"trained with final_norm False.*Set model\.final_norm \(MPT"):
        run(root, kind, load_path=str(path), **short)
    assert int(run(root, kind, off, load_path=str(path), **short).state.timestamp.batch) == 2
    names = [name for name, _ in read_checkpoint(path).model.named_parameters()]
    assert not {"model.transformer.norm_f.weight", "model.model.norm.weight"} & set(names)


@pytest.mark.parametrize("final_norm", [True, False])
def test_the_two_forms_are_one_model(final_norm: bool, root: Path) -> None:
    """The same weights give the same logits and gradients, in FP8 too, though one block sums plainly and the other does not."""
    from llmfoundry.utils.builders import build_composer_model, build_tokenizer

    from foundry_fp8.models.mus.structure import initialise_mpt_head, unit_scaled
    from foundry_fp8.surgery.apply import apply_fp8

    tokenizer = build_tokenizer(str(root / "tokenizer"), {"model_max_length": SEQ})
    without: dict[str, dict[str, Any]] = {
        "mpt": {"norm_type": "no_norm"},
        "mus_causal_lm": {"final_norm": False},
    }
    mpt, mus = (
        build_composer_model(
            name=(cfg := {**MODELS[kind], **({} if final_norm else off)}).pop("name"),
            tokenizer=tokenizer,
            cfg=cfg,
        ).model
        for kind, off in without.items()
    )
    assert all(unit_scaled(model).final_norm == final_norm for model in (mpt, mus))
    initialise_mpt_head(mpt)
    for name, parameter in mpt.named_parameters():
        expected = 1.0 if parameter.dim() == 2 else 0.0
        assert float(parameter.detach().std()) == pytest.approx(expected, abs=0.05), name
    renamed = {
        "wte": "embed_tokens", "blocks": "layers", "attn.Wqkv": "self_attn.qkv_proj", "attn.out_proj": "self_attn.o_proj",
        "attn.post_norm": "attention_norm", "ffn.post_norm": "mlp_norm", "ffn.": "mlp.", "transformer": "model",
        "norm_f": "norm",
    }  # fmt: skip
    pairs = []
    for name, parameter in mpt.named_parameters():
        for old, new in renamed.items():
            name = name.replace(old, new)
        pairs.append((name, parameter, mus.get_parameter(name)))
    assert len(pairs) == len(list(mus.parameters())) == 2 + 2 * 6 + final_norm
    for _, parameter, same in pairs:
        parameter.data.add_(torch.rand_like(parameter) * 0.2) if parameter.dim() == 1 else None
        same.data.copy_(parameter.data)
    ids = torch.randint(0, 257, (2, SEQ))
    for model in (mpt, mus):
        apply_fp8(model, recipe={"name": "unit", "gradient_scale": 8192}, evaluate="fp8")
    for model in (mpt, mus):
        for mode in (False, True):  # high precision, then FP8
            model.train(mode)
            for module in model.modules():
                if hasattr(module, "evaluate"):
                    module.evaluate = "high_precision"
    mpt.eval(), mus.eval()
    torch.testing.assert_close(mpt(ids).logits, mus(ids).logits, rtol=1e-4, atol=1e-5)
    mpt.train(), mus.train()
    for model in (mpt, mus):
        torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten()).backward()
    for name, a, b in pairs:
        # A rounding of the stream apart, some elements fall on the other side of an FP8 step.
        assert (a.grad - b.grad).norm() < 0.02 * b.grad.norm(), name


@pytest.mark.parametrize(
    "change, said",
    [
        ({"logit_scale": None}, r"model\.logit_scale: None; in a µnit-scaled MPT it is 1/d_model"),
        ({"norm_type": "layernorm"}, r"model\.norm_type: .layernorm.*it is mus_norm"),
        ({"tie_word_embeddings": True}, r"model\.tie_word_embeddings"),
        (
            {
                "learned_pos_emb": True,
                "attn_config": {"attn_type": "mus_attention", "attn_impl": "torch", "tau": 0.4},
            },
            r"model\.learned_pos_emb",
        ),
        (
            {"attn_config": {"attn_type": "mus_attention", "attn_impl": "torch", "tau": 0.4}},
            r"model\.attn_config\.rope: False; in a µnit-scaled MPT it is true",
        ),
        ({"init_config": {"name": "kaiming_normal_"}}, r"model\.init_config\.name"),
        (
            {"fc_type": {"name": "unit", "output_multiplier": 1.0}},
            r"Wqkv multiplies by 1, not .*Remove model\.fc_type\.output_multiplier",
        ),
        ({"fc_type": {"name": "torch"}}, r"mus_attention needs model\.no_bias: true and model\.fc_type"),
        ({"ffn_config": {"ffn_type": "mus_ffn", "tau": 0.2}}, r"model\.attn_config\.tau"),
        ({"ffn_config": {"ffn_type": "mus_ffn", "tau": 2}}, r"model\.ffn_config\.tau: 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_mpt_that_is_unit_scaled_in_part_is_refused(change: dict[str, Any], said: str, root: Path) -> None:
    from llmfoundry.utils.builders import build_composer_model, build_tokenizer

    from foundry_fp8.models.mus.structure import unit_scaled

    cfg = {**MODELS["mpt"], **change}
    tokenizer = build_tokenizer(str(root / "tokenizer"), {"model_max_length": SEQ})
    with pytest.raises(ConfigError, match=said):
        unit_scaled(build_composer_model(name=cfg.pop("name"), tokenizer=tokenizer, cfg=cfg))


def test_the_recipe_is_refused_where_it_cannot_hold(root: Path) -> None:
    with pytest.raises(ConfigError, match="need layers with µnit Scaling's output multiplier"):
        train(config(root, algorithms={"fp8": {"recipe": "unit"}}))
    with pytest.raises(ConfigError, match="only recipe: unit gives"):
        run(root, "mpt", algorithms={"fp8": {"recipe": "delayed"}})
    with pytest.raises(ConfigError, match=r"unit_scaling\.base_width: missing.*write 64"):
        run(root, "mpt", algorithms={"unit_scaling": {}})

    # Composer has no amp_fp16 on a CPU; the refusal reads the precision alone.
    state = SimpleNamespace(precision=Precision.AMP_FP16, fsdp_config=None)
    with pytest.raises(ConfigError, match="amp_fp16 scales the loss"):
        FP8(recipe="unit").apply(Event.INIT, state, Logger(state))  # type: ignore[arg-type]
