"""FP8 through LLM Foundry's own train entry, on one rank."""

import pytest
import torch
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from foundry_fp8.config import ConfigError
from foundry_fp8.numerics.recipes import FOR_ANY_MODEL
from tests.export.served import stored
from tests.integration.foundry_runs import MPT, config, hugging_face, train, weights
from tests.model_zoo import dmoe

pytestmark = pytest.mark.integration


def fp8(recipe, **options):
    return {"fp8": {"recipe": recipe, **options}}


def test_a_resumed_run_ends_bit_exactly_like_an_uninterrupted_one(root, delayed_run):
    assert len(delayed_run.trainer.state.algorithms[0].report.converted) == 8
    resumed = train(config(root, load_path=delayed_run.checkpoint))
    for name, value in weights(resumed).items():
        assert torch.equal(value, delayed_run.weights[name]), name


@pytest.mark.full
@pytest.mark.parametrize("recipe", [name for name in FOR_ANY_MODEL if name != "delayed"])
def test_runs_in_other_recipes_resume_bit_exactly(root, tmp_path, recipe):
    whole = train(config(root, algorithms=fp8(recipe), save_folder=str(tmp_path), save_interval="2ba"))
    resumed = train(config(root, algorithms=fp8(recipe), load_path=str(tmp_path / "ep0-ba2-rank0.pt")))
    expected = weights(whole)
    for name, value in weights(resumed).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("model", "recipe", "count"),
    [
        pytest.param("dmoe", "delayed", 6, marks=pytest.mark.full),
        pytest.param("dmoe", "block", 6, marks=pytest.mark.full),
        ("dbrx", "current", 6),
        pytest.param("mixtral", "current", 24, marks=pytest.mark.full),
        pytest.param("qwen2_moe", "current", 24, marks=pytest.mark.full),
    ],
)
def test_experts_train_in_fp8_and_resume_bit_exactly(root, tmp_path, model, recipe, count):
    made = {**MPT, "ffn_config": dmoe("glu")} if model == "dmoe" else hugging_face(root, model)
    same = {"model": made, "algorithms": fp8(recipe)}
    whole = train(config(root, **same, save_folder=str(tmp_path), save_interval="2ba"))
    report = whole.state.algorithms[0].report
    experts = [row for row in report.rows if ".experts." in row.name]
    assert len(experts) == count and {(row.action, row.precision) for row in experts} == {
        ("converted", "fp8")
    }
    resumed = train(config(root, **same, load_path=str(tmp_path / "ep0-ba2-rank0.pt")))
    expected = weights(whole)
    for name, value in weights(resumed).items():
        assert torch.equal(value, expected[name]), name


def test_checkpoints_go_from_high_precision_to_fp8_and_back(root, delayed_run, tmp_path):
    still = {
        "optimizer": {"name": "decoupled_adamw", "lr": 1e-30, "weight_decay": 0.0},
        "scheduler": {"name": "constant_with_warmup", "t_warmup": "0ba"},
    }
    train(config(root, algorithms=None, save_folder=str(tmp_path), max_duration="2ba"))
    high_precision = str(tmp_path / "ep0-ba2-rank0.pt")
    for path, algorithms in ((high_precision, fp8("delayed")), (delayed_run.checkpoint, None)):
        saved = torch.load(path, weights_only=False)["state"]["model"]
        weights_alone = {"load_path": path, "load_weights_only": True, "max_duration": "1ba", **still}
        loaded = train(config(root, algorithms=algorithms, **weights_alone))
        assert all(torch.equal(v, saved[n]) for n, v in weights(loaded).items())
        resumed = train(config(root, algorithms=algorithms, load_path=path, max_duration="3ba"))
        assert resumed.state.timestamp.batch == 3


def test_a_checkpoint_is_exported_with_the_scales_of_its_state(delayed_run, tmp_path):
    exported = CliRunner().invoke(app, ["export", delayed_run.checkpoint, str(tmp_path)])
    assert exported.exit_code == 0 and "8 linears" in exported.output, exported.output
    config, tensors = stored(tmp_path)
    assert config["init_device"] == "cpu" and config["torch_dtype"] == "float32"
    state = torch.load(delayed_run.checkpoint, weights_only=False)["state"]
    fp8 = dict(state["algorithms"])["FP8"]
    for name, scales in fp8["state"][0]["fp8"]["modules"].items():
        inner = name.removeprefix("model.")
        x, w, _ = scales["scale"]
        assert float(tensors[f"{inner}.input_scale"]) == float(x.reciprocal())
        assert float(tensors[f"{inner}.weight_scale"]) == float(w.reciprocal())
        weight = (state["model"][f"{name}.weight"] * w).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(tensors[f"{inner}.weight"].float(), weight.float())


def test_resuming_with_another_recipe_is_an_error_with_the_way_out(root, delayed_run):
    other = {"algorithms": fp8("current"), "load_path": delayed_run.checkpoint, "max_duration": "3ba"}
    with pytest.raises(RuntimeError, match="made by the recipe"):
        train(config(root, **other))
    fresh = train(config(root, **other, load_ignore_keys=["state/algorithms"]))
    assert fresh.state.timestamp.batch == 3


@pytest.mark.full
def test_a_hugging_face_llama_trains_in_fp8_and_learns(root):
    losses = {}
    for algorithms in (None, fp8("mxfp8")):
        cfg = config(root, model=hugging_face(root, "llama"), algorithms=algorithms, max_duration="12ba")
        trainer = train(cfg)
        losses[bool(algorithms)] = trainer.state.total_loss_dict["loss/train/total"]
        if algorithms:
            report = trainer.state.algorithms[0].report
            assert len(report.converted) == 14 and list(report.skipped) == ["model.lm_head"]
            assert trainer.state.model.model.model.layers[0].mlp.gate_proj.ledger.flops["wgrad", "fp8"] > 0
    assert losses[True] < 6.0  # ln(512) = 6.24
    assert abs(losses[True] - losses[False]) / losses[False] < 0.02


def test_activation_checkpointing_by_composer_changes_nothing(root, delayed_run):
    model = dict(MPT, activation_checkpointing_target="mptblock")
    checkpointed = train(config(root, model=model))
    assert all(torch.equal(v, delayed_run.weights[n]) for n, v in weights(checkpointed).items())


@pytest.mark.full
def test_a_compiled_run_equals_the_eager_one(root):
    eager = train(config(root, algorithms=fp8("current"), max_duration="2ba"))
    compiled = train(
        config(root, algorithms=fp8("current"), max_duration="2ba", compile_config={"backend": "aot_eager"})
    )
    expected, got = weights(eager), weights(compiled)
    assert sorted(got) == sorted(expected)
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_the_hugging_face_checkpointer_exports_a_plain_model(root, tmp_path):
    from transformers import AutoModelForCausalLM

    callbacks = {
        "hf_checkpointer": {"save_folder": str(tmp_path), "save_interval": "2ba", "precision": "float32"}
    }
    trainer = train(
        config(
            root,
            model=hugging_face(root, "llama"),
            algorithms=fp8("delayed"),
            max_duration="2ba",
            callbacks=callbacks,
        )
    )
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface" / "ba2")
    trained = dict(trainer.state.model.model.named_parameters())
    found = dict(exported.named_parameters())
    assert sorted(found) == sorted(trained)
    assert all(torch.equal(found[name], trained[name]) for name in found)


def test_evaluation_in_the_middle_of_training_leaves_no_trace(root, delayed_run):
    cfg = config(root, eval_interval="1ba", eval_subset_num_batches=2)
    cfg["eval_loader"] = {**cfg["train_loader"], "drop_last": False}
    with_eval = train(cfg)
    assert all(torch.equal(v, delayed_run.weights[n]) for n, v in weights(with_eval).items())


def test_composers_own_fp8_is_refused(root):
    from composer.core import Precision

    from foundry_fp8.algorithms.fp8 import FP8

    class State:
        precision = Precision.AMP_FP8
        fsdp_config = None

    from composer.core import Event

    with pytest.raises(ConfigError, match=r"precision: amp_fp8 .*Set precision: amp_bf16"):
        FP8(recipe="current").apply(Event.INIT, State(), None)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recipe": "delaid"}, "Did you mean 'delayed'"),
        ({"recipe": "current", "exlude": []}, "Did you mean 'exclude'"),
        ({"recipe": "current", "include": ["*.no_such"]}, "matches none of the model's 8 linear layers"),
    ],
)
def test_a_bad_yaml_fails_before_training(root, options, message):
    with pytest.raises(ConfigError, match=message):
        train(config(root, algorithms={"fp8": options}))
