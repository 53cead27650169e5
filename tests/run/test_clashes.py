"""Each clash of the table: the least YAML that has it shows it in ``doctor``, and the same settings end training with the same words."""

import ast
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composer.core import Event, Precision
from composer.utils.parallelism import FSDPConfig
from torch import nn

import foundry_fp8
from foundry_fp8.algorithms.activation_checkpointing import ActivationCheckpointing
from foundry_fp8.algorithms.activation_compression import ActivationCompression
from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.algorithms.fused_head import FusedHead
from foundry_fp8.cli.hardware import parse_hardware
from foundry_fp8.cli.run_check import check_run
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.frozen_weight import keep_in_fp8
from foundry_fp8.numerics.recipes import parse_recipe
from foundry_fp8.run.clashes import CLASHES, KEYS
from foundry_fp8.run.settings import Run
from tests.multiprocess import launch

MODEL = {"name": "mpt_causal_lm", "d_model": 64, "n_heads": 2, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 32,
         "vocab_size": 128, "loss_fn": "torch_crossentropy", "use_train_metrics": False, "attn_config": {"attn_impl": "torch"}}  # fmt: skip
PLAIN = {
    "run_name": "r",
    "max_seq_len": 32,
    "precision": "amp_bf16",
    "model": MODEL,
    "algorithms": {"fp8": {"recipe": "current"}},
}


def doctor(tmp_path, config, hardware="h100x2"):
    import yaml

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return check_run(tmp_path / "run.yaml", parse_hardware(hardware))


def run(model=None, **changes):
    """The plain run with other algorithms, keys, or keys of its model."""
    return {**PLAIN, **changes, "model": {**MODEL, **(model or {})}}


def algorithm(name, **options):
    return run(algorithms={**PLAIN["algorithms"], name: options})


def trained(algorithm, event, **state):
    """What ``algorithm`` says of a small state at ``event``."""
    given = {
        "precision": Precision.AMP_BF16,
        "fsdp_config": None,
        "tp_config": None,
        "model": nn.Linear(16, 16),
        "train_metrics": {},
    }
    with pytest.raises(ValueError) as raised:
        algorithm.apply(event, SimpleNamespace(**{**given, **state}), None)
    return str(raised.value)


def flash_loss():
    """A model whose loss is of a class that flash-attention has, which needs a GPU to be imported."""
    loss = type("CrossEntropyLoss", (nn.Module,), {"__module__": "flash_attn.losses.cross_entropy"})
    model = nn.Module()
    model.lm_head, model.loss = nn.Linear(16, 32), loss()
    return trained(FusedHead(head="lm_head"), Event.FIT_START, model=model)


def te_layers():
    model = nn.Sequential(type("Linear", (nn.Module,), {"__module__": "transformer_engine.pytorch"})())
    with pytest.raises(ValueError) as raised:
        foundry_fp8.apply_fp8(model, recipe="current")
    return str(raised.value)


def published():
    """Frozen FP8 codes, as LoRA on a published checkpoint has them."""
    linear = nn.Linear(16, 16).requires_grad_(False)
    keep_in_fp8(linear.weight, parse_recipe("block", "recipe"))
    with pytest.raises(ConfigError) as raised:
        foundry_fp8.FP8Run(recipe="block").convert(nn.Sequential(linear), Run(fsdp=FSDPConfig()))
    return str(raised.value)


def compiled():
    return torch.compile(nn.Sequential(nn.Linear(16, 16)))


TIMED = [{"from": "8ba", "recipe": "block"}, {"recipe": "current"}]
SHARDED = {"sharding_strategy": "FULL_SHARD"}
ONE_PROCESS = {
    "`precision: amp_fp8`, `algorithms.fp8`": (
        run(precision="amp_fp8"), lambda: trained(FP8(), Event.INIT, precision=Precision.AMP_FP8)),
    "`precision: amp_fp16`, `fp8.recipe: unit`": (
        run(precision="amp_fp16", algorithms={"fp8": {"recipe": "unit"}}),
        lambda: trained(FP8(recipe="unit"), Event.INIT, precision=Precision.AMP_FP16)),
    "times in `fp8.recipe` that a run never reaches, or does not count": (
        run(max_duration="8ba", algorithms={"fp8": {"recipe": TIMED}}), lambda: trained(FP8(recipe=TIMED), Event.INIT, max_duration="8ba")),
    "`model.fc_type: te`, `ffn_type: te_ln_mlp`": (run(model={"fc_type": "te"}), te_layers),
    "`fsdp_config`, `fp8.frozen_weights: fp8`": (
        run(fsdp_config=SHARDED, algorithms={"fp8": {"frozen_weights": "fp8"}}),
        lambda: trained(FP8(frozen_weights="fp8"), Event.INIT, fsdp_config=FSDPConfig())),
    "`fsdp_config`, `hf_fp8_causal_lm` with `peft_config`": (
        run(fsdp_config=SHARDED) | {"model": {"name": "hf_fp8_causal_lm", "pretrained_model_name_or_path": "x", "peft_config": {}}},
        published),
    "`compile_config`, `activation_compression`": (
        algorithm("activation_compression") | {"compile_config": {}},
        lambda: trained(ActivationCompression(), Event.FIT_START, model=compiled())),
    "`fsdp_config.activation_cpu_offload`, `activation_compression`": (
        algorithm("activation_compression") | {"fsdp_config": {"activation_cpu_offload": True}},
        lambda: trained(ActivationCompression(), Event.FIT_START, fsdp_config=FSDPConfig(activation_cpu_offload=True))),
    "`activation_checkpointing.budget`, `activation_compression`": (
        run(algorithms={"fp8": {"recipe": "current"}, "activation_checkpointing": {"budget": 0.5}, "activation_compression": {}}),
        lambda: trained(ActivationCheckpointing(budget=0.5), Event.INIT, algorithms=[ActivationCompression()])),
    "`fused_head`, `model.use_train_metrics`": (
        algorithm("fused_head") | {"model": {**MODEL, "use_train_metrics": True}},
        lambda: trained(FusedHead(), Event.FIT_START, train_metrics={"perplexity": None})),
    "`fused_head`, `loss_fn: fused_crossentropy`": (
        algorithm("fused_head") | {"model": {**MODEL, "loss_fn": "fused_crossentropy"}}, flash_loss),
}  # fmt: skip
HYBRID = algorithm("hybrid_sharding", shard=2)
TWO_RANKS = {
    "`hybrid_sharding`, no `fsdp_config`": ("hybrid, DDP", HYBRID),
    "`hybrid_sharding`, `tp_config`": (
        "hybrid, tensor parallel", HYBRID | {"fsdp_config": {}, "tp_config": {"strategy": "ffn", "tensor_parallel_degree": 2}}),
    "`hybrid_sharding`, FSDP2's `load_monolith_rank0_only`": (
        "hybrid, rank 0 only", HYBRID | {"fsdp_config": {"load_monolith_rank0_only": True}}),
    "`hybrid_sharding`, another `fsdp_config.sharding_strategy`": (
        "hybrid, strategy", HYBRID | {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}),
    "`compressed_communication.gradients: int4`, nothing replicates": (
        "int4", algorithm("compressed_communication", gradients="int4") | {"fsdp_config": SHARDED}),
    "`compressed_communication.error_feedback: true`, nothing replicates": (
        "error_feedback", algorithm("compressed_communication", error_feedback=True) | {"fsdp_config": SHARDED}),
    "`compressed_communication.rounding: stochastic`, nothing is sharded": (
        "stochastic", algorithm("compressed_communication", rounding="stochastic")),
    "`compressed_communication.parameters`, no `fsdp_config`": (
        "parameters", algorithm("compressed_communication", parameters="e4m3")),
    "`compressed_communication.activations: fp8`, no `tp_config`": (
        "activations", algorithm("compressed_communication", activations="fp8")),
    "`compressed_communication`, FSDP1's `HYBRID_SHARD` over shard groups of one rank": (
        "one rank of a hybrid", algorithm("compressed_communication") | {"fsdp_config": {
            "sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}}),
}  # fmt: skip
ELSEWHERE = {
    "`compressed_communication.parameters`, FSDP2's `reshard_after_forward: <int>`": "tests/multiprocess/test_faults.py",
}


def test_every_error_of_the_table_is_tried():
    errors = {clash.settings for clash in CLASHES if clash.error and "composer" in clash.trainers}
    assert errors == {*ONE_PROCESS, *TWO_RANKS, *ELSEWHERE}


def test_a_plain_run_has_no_clash(tmp_path):
    found = doctor(tmp_path, run(fsdp_config=SHARDED))
    assert [f for f in found if f.topic == "clash" or f.level == "error"] == []


@pytest.mark.parametrize("settings", ONE_PROCESS)
def test_doctor_shows_what_training_raises(settings, tmp_path):
    config, training = ONE_PROCESS[settings]
    said = [finding.text for finding in doctor(tmp_path, config) if finding.level == "error"]
    assert training() in said


@pytest.fixture(scope="module")
def texts():
    from tests.multiprocess.clashes import texts

    first, second = launch.call(texts, 2, imports=launch.COMPOSER)
    assert first == second
    return first


@pytest.mark.multiprocess
@pytest.mark.integration
@pytest.mark.parametrize("settings", TWO_RANKS)
def test_doctor_shows_what_two_ranks_raise(settings, texts, tmp_path, monkeypatch):
    name, config = TWO_RANKS[settings]
    monkeypatch.setenv("FSDP_VERSION", "2" if "FSDP2" in settings else "1")
    assert texts[name] in [finding.text for finding in doctor(tmp_path, config) if finding.level == "error"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (algorithm("activation_compression", targets=["*.nothing"]), "algorithms.activation_compression.targets"),
        (algorithm("fused_head", head="no.head"), "algorithms.fused_head.head: the model has no no.head"),
        (algorithm("unit_scaling", base_width=64), "algorithms.unit_scaling: the model is not µnit-scaled"),
        (run(callbacks={"kurtosis_monitor": {"tensors": {"x": ["*.nothing@input"]}}}), "kurtosis_monitor.tensors.x"),
        (run(model={"d_model": 40}), "no linear layer was converted"),
        (run(algorithms={"fp8": {"recipe": "current", "accumulation": "hopper"}}), "is for backend: emulated"),
        (algorithm("hybrid_sharding", shard=3) | {"fsdp_config": {}}, "hybrid_sharding.shard: 3 does not divide the 2 ranks"),
        (algorithm("compressed_communication", scope="inter_node"), "nothing crosses nodes"),
        (run(fsdp_config={"data_parallel_shard_degree": 4}), "data_parallel_shard_degree 4 is not the 2 ranks"),
        (run(fsdp_config={"sharding_strategy": "FULL"}), "fsdp_config.sharding_strategy: 'FULL' is not one of"),
    ],
)  # fmt: skip
def test_what_only_the_model_or_the_ranks_decide_is_shown_too(config, said, tmp_path):
    found = doctor(tmp_path, config)
    assert any(said in f.text for f in found if f.level == "error"), found


HIGH = {"recipe": "high_precision"}
WRONG = [  # options of algorithms.fp8
    {"backend": "emulated", "cache_weights": True}, {"backend": "emulated", "fuse": True}, {"backend": "native", "accumulation": "hopper"},
    {"backend": "emulated", "recipe": "mxfp8", "accumulation": "hopper"}, {"backend": "transformer_engine", "frozen_weights": "fp8"},
    {"backend": "native", "fuse": True, "include": ["*.down_proj"]}, {"frozen_weights": "fp8"}, {"exclude": ["*"]}, {"keep_first_blocks": 2},
    {"recipe": [{"roles": ["attention"], "recipe": "delayed"}, {"recipe": "current"}], "attention": True}, {"attention": {"recipe": "block"}},
    {"backend": "transformer_engine", "attention": True}, {"attention": {"exclude": ["*"]}}, {"fuse": True, "wgrad": "high_precision"},
    {"recipe": "measured", "attention": True}, {"recipe": [{"recipe": "current"}], "include": ["*.ffn.*"]}, {"recipe": [{"recipe": "auto"}]},
    {"recipe": [{"recipe": "current"}, {"roles": ["mlp"], "recipe": "block"}]}, {"recipe": []}, {"recipe": [HIGH]},
    {"recipe": [{"recipe": "delayed", "roles": ["mlp"]}, {"recipe": {"name": "delayed", "margin": 1}}]},
    {"recipe": [{**HIGH, "roles": ["mlp"], "gemms": {"wgrad": "fp8"}}, {"recipe": "current"}]},
    {"recipe": [{"recipe": "current", "gemms": {"fprop": "high_precision"}}]}, {"recipe": TIMED, "attention": True},
    {"recipe": [{"recipe": "current", "from": "90sec"}]}, {"recipe": [{"recipe": "current", "from": 5, "until": "20Btok"}]},
]  # fmt: skip
NOT_OF_A_YAML = {
    "enabled: false converts nothing": "a call of apply_fp8", "is converted to FP8 already": "two calls", "is a single": "a call",
    "the first batch sent no gradient": "a batch shows it", "cannot be written": "of the machine that trains",
    "needs scales that are powers of two": "of a frozen base: tests/layers/test_frozen_weight.py", "something else holds it": "of no known model",
    "do not fit a weight": "of a published checkpoint: tests/export/test_load.py", "its values are lost": "the same",
    "no FP8 layer computes what": "the same",
    "has published codes": "the same", "Load the model dequantised": "the same", "as PEFT makes an adapter": "the same", "FP8 codes were cast": "the same",
}  # fmt: skip


def raised():
    """What ``ConfigError`` is raised with in algorithms, callbacks and surgery, as patterns; constants are the table's."""
    for room in ("algorithms", "callbacks", "surgery"):
        for path in (Path(foundry_fp8.__file__).parent / room).rglob("*.py"):
            calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
            for call in calls:
                if getattr(call.func, "id", "") == "ConfigError" and isinstance(call.args[0], ast.JoinedStr):
                    parts = call.args[0].values
                    text = "".join(re.escape(p.value) if isinstance(p, ast.Constant) else ".*" for p in parts)
                    yield text.removesuffix(
                        r"\."
                    )  # which the line on an algorithm that cannot be built leaves out


def test_doctor_shows_every_error_that_options_of_fp8_raise(tmp_path):
    configs = [run(algorithms={"fp8": {"recipe": "current", **options}}) for options in WRONG]
    said = [f.text for config in configs for f in doctor(tmp_path, config, "h100x1") if f.level == "error"]
    unseen = [pattern for pattern in raised() if not any(re.search(pattern, text, re.S) for text in said)]
    exempt = [text for text in NOT_OF_A_YAML if any(re.escape(text) in pattern for pattern in unseen)]
    assert len(unseen) == len(exempt) == len(NOT_OF_A_YAML), unseen


def test_what_one_device_leaves_out_is_not_refused(tmp_path):
    """LLM Foundry takes FSDP off there."""
    config = run(
        fsdp_config=SHARDED, algorithms={"fp8": {"recipe": "current"}, "hybrid_sharding": {"shard": 2}}
    )
    assert [f.text for f in doctor(tmp_path, config, "h100x1") if f.level == "error"] == []


def test_a_run_in_high_precision_may_be_in_float16(tmp_path):
    config = run(precision="amp_fp16", algorithms={"fp8": {"recipe": "unit", "enabled": False}})
    assert [f.text for f in doctor(tmp_path, config) if f.level == "error"] == []


def test_every_clash_is_of_a_trainer():
    assert {trainer for clash in CLASHES for trainer in clash.trainers} == set(KEYS)
    assert all(dataclasses.asdict(clash)["text"] for clash in CLASHES)
