"""FP8 in Hugging Face's Trainer: a run that is killed and resumed is the run that was not; what cannot run together is refused."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from foundry_fp8.config import ConfigError
from foundry_fp8.integrations import transformers as of_trainer
from foundry_fp8.integrations.transformers import FP8Callback
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.observe import kurtosis
from foundry_fp8.observe.flops.gemms import gemms_of
from tests.callbacks.conftest import build_llama
from tests.integrations.test_training_state import same
from tests.multiprocess import launch

IMPORTS = "torch.distributed.fsdp,transformers.trainer,foundry_fp8.integrations.transformers,tests.callbacks.conftest"
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:(transformers|accelerate)[.]",
    "ignore::UserWarning:(transformers|accelerate|torch)[.]",
)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("world", "wrap", "precision"),
    [
        pytest.param(1, "none", "fp32", marks=pytest.mark.full),
        pytest.param(2, "ddp", "bf16", marks=pytest.mark.full),
        (2, "fsdp2", "bf16"),
    ],
)
@pytest.mark.parametrize("host", ["trainer", "sft"])
def test_a_killed_run_resumes_bit_for_bit_with_the_guard_having_acted(world, wrap, precision, host, tmp_path):
    if host == "sft":
        pytest.importorskip("trl", reason="TRL's releases need a later transformers than LLM Foundry's")

    def run(folder, *then, check=True):
        arguments = (tmp_path / folder, wrap, precision, host, *then)
        return launch.run("run_trainer.py", world, *arguments, imports=IMPORTS, check=check, timeout=600)

    run("whole")
    codes, _ = run("killed", "kill", 5, check=False)
    assert codes == [-9] * world
    run("killed", "resume", 4)
    whole, resumed = (torch.load(tmp_path / name / "end.pt") for name in ("whole", "killed"))
    assert whole["demoted"]
    assert same(whole, resumed)


@pytest.mark.full
@pytest.mark.multiprocess
def test_a_model_that_trainer_makes_itself_is_replicated_and_not_sharded(tmp_path):
    def run(wrap, host, **options):
        arguments = (tmp_path / wrap / host, wrap, "bf16", host)
        return launch.run("run_trainer.py", 2, *arguments, imports=IMPORTS, timeout=600, **options)

    run("ddp", "trainer")
    run("ddp", "init")
    given, made = (torch.load(tmp_path / "ddp" / host / "end.pt") for host in ("trainer", "init"))
    assert same(given, made)
    codes, output = run("fsdp2", "init", check=False)
    assert any(codes) and "what model_init= makes is in FSDP before a callback sees it" in str(output)


@pytest.fixture(autouse=True)
def _the_environment_as_it_was(monkeypatch):
    """Trainer speaks to Accelerate through it."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


SETTINGS = {
    "output_dir": "out", "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no",
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2,
}  # fmt: skip
IDS = torch.randint(3, 64, (16, 16), generator=torch.Generator().manual_seed(1))
SAVING = {"save_strategy": "steps", "save_steps": 2}


def trainer_of(callbacks, model=None, model_init=None, **options):
    data = [{"input_ids": row, "labels": row} for row in IDS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(**SETTINGS | options)
        made = {"model_init": model_init} if model_init else {"model": model or build_llama()}
        return Trainer(**made, args=arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)


def callback(**options):
    return FP8Callback(**{"recipe": "delayed", "backend": "emulated", "announce": False} | options)


def test_the_model_is_converted_before_the_optimizer_and_the_report_is_of_what_ran(capsys):
    fp8 = callback(announce=True)
    trainer = trainer_of([fp8])
    said = capsys.readouterr().err
    assert (
        trainer.optimizer is None
        and "FP8: 14 of 15 linears" in said
        and "no callbacks.divergence_guard" in said
    )
    trainer_of([callback(announce=True, guard={})])
    assert "no callbacks.divergence_guard" not in capsys.readouterr().err
    trainer.train()
    assert fp8.report.converted_share > 0.5 and FP8State.of(trainer.model).delayed.amax_history.any()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
            marks=pytest.mark.full,
        ),
        {"gradient_accumulation_steps": 2, "bf16": True},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ],
    ids=["checkpointing", "accumulation", "compile"],
)
def test_trainers_own_options_run_beside_it(options):
    fp8 = callback(guard={"interval": 2, "rows": 1})
    trainer = trainer_of([fp8], **options)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "fp8_error/loss_gap" in entry]
    assert logged[0]["step"] == 2
    assert torch.isfinite(
        torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    ).all()


def test_monitors_go_into_trainers_log():
    peaks = {"fp8": 4e12, "fp32": 1e12, "bf16": 2e12}
    monitors = {
        "mfu": {"interval": 2, "peak_flops": peaks},
        "kurtosis": {"interval": 2},
        "health": {"interval": 2},
    }
    found = {}
    for evaluate in (False, True):
        model, asked = build_llama(), {"eval_strategy": "steps", "eval_steps": 1} if evaluate else {}
        fp8 = callback(recipe="current", monitors=monitors, evaluate="fp8")
        trainer = trainer_of([fp8], model, max_steps=4, gradient_accumulation_steps=2, **asked)
        trainer.train()
        logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
        assert {step for step, entry in logged.items() if "mfu/mfu" in entry} == {2, 4}
        assert logged[4]["kurtosis_token/residual/worst"] > 0 and "fp8/sqnr_db/dy/worst" in logged[2]
        found[evaluate] = fp8.monitors.running["mfu"].total.model
    linear = sum(
        sum(gemm.flops(3 * 2 * 2 * 16).values()) for gemm in gemms_of(model)
    )  # steps, microbatches, rows, tokens
    assert sum(found[True].values()) == sum(found[False].values()) > linear


def test_a_monitor_that_fails_is_off_and_training_goes_on(caplog, monkeypatch):
    fp8 = callback(recipe="current", monitors={"kurtosis": {"interval": 1}})
    monkeypatch.setattr(kurtosis, "row_sums", None)
    trainer_of([fp8]).train()
    assert fp8.monitors.running == {}
    assert caplog.text.count("kurtosis failed and is off") == 1


def test_lora_trains_on_a_base_in_fp8():
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build_llama(), config)
    before = {n: p.clone() for n, p in model.named_parameters()}
    trainer_of([callback(guard={"interval": 2})], model).train()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n, p in model.named_parameters() if p.requires_grad}
    assert isinstance(
        model.get_submodule("base_model.model.model.layers.0.mlp.down_proj.base_layer"), FP8Linear
    )


def test_a_guard_that_stops_ends_the_run_and_its_words_are_in_the_log_history():
    fp8 = callback(guard={"interval": 2, "gradient_limit": 1e-6, "actions": ["stop"]})
    trainer = trainer_of([fp8], max_steps=6)
    trainer.train()
    assert trainer.state.global_step == 2
    assert any("alarm" in entry.get("guard", "") for entry in trainer.state.log_history)


def test_a_checkpoint_without_fp8_state_is_named_and_another_recipe_refused(caplog):
    trainer_of([], max_steps=2, **SAVING).train()
    resumed = trainer_of([callback(guard={})], max_steps=3)
    resumed.train(resume_from_checkpoint="out/checkpoint-2")
    assert caplog.text.count("The checkpoint has no state of foundry_fp8 for the FP8 state") == 1
    assert "for the guard" in caplog.text and "no FP8 state was loaded" not in caplog.text
    trainer_of([callback()], max_steps=2, **SAVING, output_dir="fp8").train()
    saved = json.loads(Path("fp8/checkpoint-2/trainer_state.json").read_text())["stateful_callbacks"][
        "FP8Callback"
    ]
    assert saved["args"]["recipe"] == "delayed" and isinstance(saved["attributes"]["saved"], str)
    with pytest.raises(RuntimeError, match="made by the recipe"):
        trainer_of([callback(recipe="current")]).train(resume_from_checkpoint="fp8/checkpoint-2")


def test_trainer_may_make_the_callback_again_from_a_checkpoint():
    whole = trainer_of([callback(guard={})], max_steps=4, **SAVING)
    whole.train()
    resumed = trainer_of([callback(guard={})], max_steps=4, restore_callback_states_from_checkpoint=True)
    resumed.train(resume_from_checkpoint="out/checkpoint-2")
    assert same(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))


def test_a_model_that_trainer_makes_itself_is_converted_whenever_it_trains():
    """``model_init``: without an argument, resumed, with a search's trial, and the twin in high precision."""
    plain = trainer_of([callback(guard={})], max_steps=4, data_seed=1, **SAVING)
    plain.train()
    fp8 = callback(guard={}, monitors={"kurtosis": {"interval": 1}})
    made = trainer_of([fp8], model_init=lambda: build_llama(), max_steps=4, data_seed=1, **SAVING)
    for resume in (None, "out/checkpoint-2"):
        made.train(resume_from_checkpoint=resume)
        assert same(dict(plain.model.state_dict()), dict(made.model.state_dict()))
        assert fp8.report.converted_share > 0.5
        assert any("kurtosis_token/residual/worst" in entry for entry in made.state.log_history)

    off = trainer_of(
        [FP8Callback(enabled=False, monitors={"kurtosis": {"interval": 1}})], model_init=lambda: build_llama()
    )
    off.train()
    assert FP8State.of(off.model) is None
    assert any("kurtosis_token/residual/worst" in entry for entry in off.state.log_history)


def test_a_search_converts_the_model_of_each_trial():
    pytest.importorskip("wandb")  # whose trials are mappings
    fp8, widths = callback(), []
    tried = trainer_of(
        [fp8], model_init=lambda trial: build_llama(layers=(trial or {"n": 1})["n"]), max_steps=1
    )
    for trial in ({"n": 1}, {"n": 2}, {"n": 1}):
        tried.train(trial=trial)
        widths.append(len(fp8.report.converted))
        assert FP8State.of(tried.model).delayed.amax_history.any()
    assert widths[0] == widths[2] < widths[1]


def test_optuna_searches_the_rate_of_converted_models():
    """Trainer's own search, through its library: every trial ends where a run of its own with that rate ends."""
    pytest.importorskip("optuna")
    fp8, rates, ends = callback(guard={}), [], []

    def objective(metrics):
        assert FP8State.of(searched.model).delayed.amax_history.any() and len(fp8.report.converted) == 14
        rates.append(searched.args.learning_rate)
        ends.append(dict(searched.model.state_dict()))
        return metrics["eval_loss"]

    searched = trainer_of(
        [fp8], model_init=lambda: build_llama(), eval_strategy="epoch", max_steps=4, data_seed=1
    )
    best = searched.hyperparameter_search(
        backend="optuna", direction="minimize", n_trials=2, compute_objective=objective,
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
    )  # fmt: skip
    assert len(set(rates)) == 2 and best.hyperparameters["learning_rate"] in rates
    for rate, end in zip(rates, ends, strict=True):
        alone = trainer_of([callback(guard={})], learning_rate=rate, max_steps=4, data_seed=1)
        alone.train()
        assert same(dict(alone.model.state_dict()), end)


NOTHING = {"n_gpu": 1, "max_steps": -1, "bf16": False, "fp16": False, "fsdp": [], "deepspeed_plugin": None, "mixed_precision": "no",
           "torch_compile": False, "device": torch.device("cpu")}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "wrap", "said"),
    [
        ({}, nn.DataParallel, "wrapped or compiled already"),
        ({}, torch.compile, "or compiled already"),
        ({"n_gpu": 2}, nn.Module.train, "nn.DataParallel over 2 GPUs"),
        (
            {"deepspeed_plugin": SimpleNamespace(zero_stage=3)},
            nn.Module.train,
            "ZeRO-3 keeps parameters empty",
        ),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=1)}, nn.Module.train, "ZeRO-1 was never tested"),
        ({"mixed_precision": "fp8"}, nn.Module.train, "both would quantise"),
        ({"fp16": True}, nn.Module.train, "fp16 scales the loss"),
        ({"fsdp": ["full_shard"]}, nn.Module.train, "frozen_weights: fp8 does not run under FSDP"),
    ],
)
def test_what_cannot_run_together_is_refused(given, wrap, said, monkeypatch):
    asked = SimpleNamespace(**NOTHING | given)
    monkeypatch.setattr(of_trainer, "AcceleratorState", lambda: asked)
    with pytest.raises(ConfigError, match=said):
        fp8 = callback(frozen_weights="fp8", guard={})
        fp8.run.convert(wrap(build_llama()), of_trainer.settings_of(asked))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("unit", "recipe: unit has no room for"),
        ([{"blocks": "first-1", "recipe": "current"}, {"recipe": "unit"}], "recipe: unit has no room for"),
    ],
)
def test_recipes_that_need_what_trainer_does_not_give_are_refused(recipe, said, monkeypatch):
    asked = SimpleNamespace(**NOTHING | {"fp16": True})
    monkeypatch.setattr(of_trainer, "AcceleratorState", lambda: asked)
    with pytest.raises(ConfigError, match=said):
        callback(recipe=recipe).run.convert(build_llama(), of_trainer.settings_of(asked))


@pytest.mark.full
def test_measured_chooses_after_its_warmup_and_a_resumed_run_keeps_the_choice():
    measured = {
        "recipe": {"name": "measured", "warmup": 2, "error": 0.5, "recipes": ["current"]},
        "guard": {"interval": 1},
    }
    whole = callback(**measured)
    first = trainer_of([whole], max_steps=4, **SAVING)
    first.train()
    assert {m.recipe.name for m in FP8State.of(first.model).modules.values()} == {"current"}
    assert whole.run.choice is not None and whole.report.recipe_names == "current"
    resumed = callback(**measured)
    again = trainer_of([resumed], max_steps=4)
    again.train(resume_from_checkpoint="out/checkpoint-2")
    assert resumed.run.choice is None and same(dict(first.model.state_dict()), dict(again.model.state_dict()))


def test_bad_options_and_a_callback_that_comes_too_late_are_refused():
    for options in ({"guard": {"interval": 0}}, {"monitors": {"mfuu": {}}}, {"recipe": "delayedd"}):
        with pytest.raises(ConfigError, match=r"interval|monitors|recipe"):
            FP8Callback(**options)
    trainer = trainer_of([])
    trainer.add_callback(callback())
    with pytest.raises(ConfigError, match="add_callback comes too late"):
        trainer.train()
    unguarded = trainer_of([callback(guard={"interval": 2})], label_smoothing_factor=0.1)
    with pytest.raises(ConfigError, match="the model gives no loss of its own"):
        unguarded.train()


def hooked(kind):
    from accelerate import big_modeling, hooks

    model = build_llama()
    if kind == "offloaded":
        big_modeling.cpu_offload(model, execution_device="cpu")
    elif kind == "dispatched":
        big_modeling.dispatch_model(
            model, {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True
        )
    elif kind == "cast":
        big_modeling.attach_layerwise_casting_hooks(
            model, torch.bfloat16, torch.float32, skip_modules_pattern=["norm"]
        )
    else:
        hooks.add_hook_to_module(model.model.layers[1].mlp.down_proj, hooks.ModelHook())
        hooks.add_hook_to_module(model, hooks.ModelHook())
    return model


@pytest.mark.parametrize("kind", ["offloaded", "dispatched", "cast", "one"])
def test_linears_with_accelerates_hooks_are_left_out_by_name(kind):
    model, fp8 = hooked(kind), callback()
    if kind == "one":
        trainer_of([fp8], model).train()
        assert len(fp8.report.converted) == 13
        assert "Accelerate's hook ModelHook" in fp8.report.skipped["model.layers.1.mlp.down_proj"]
        return
    with pytest.raises(
        ConfigError, match=r"because Accelerate's hook .* has replaced its forward.*remove_hook_from_module"
    ):
        fp8.run.convert(model)
    from accelerate.hooks import remove_hook_from_module

    if kind == "offloaded":
        remove_hook_from_module(model, recurse=True)
        fp8.run.convert(model)
