import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from foundry_fp8.cli.plan_communication import workload_of
from foundry_fp8.cli.yaml_model import build_yaml_model, read_yaml
from foundry_fp8.gpus import GPUS
from foundry_fp8.planning.communication.machines import NETWORKS
from foundry_fp8.planning.communication.step import layout
from tests.cli.test_plan_memory import MPT


def run(*arguments):
    return CliRunner().invoke(app, ["plan", "communication", *arguments])


def test_the_table():
    result = run("--parameters", "7e9", "--gpus", "64..256")
    assert result.exit_code == 0, result.output
    assert result.output.count("FSDP 1x") >= 6 and "HSDP" in result.output
    assert "tuning.cc" in result.output  # the constants and their sources are printed


def test_tensor_parallelism_is_planned_uncompressed():
    result = run("--parameters", "7e9", "--gpus", "64", "--tensor-parallel", "8")
    assert result.exit_code == 0 and "FSDP 1x8 TP 8" in result.output
    assert "int8" not in result.output


def test_a_measured_constant_overrides():
    slow = run("--parameters", "7e9", "--gpus", "64", "--set", "across_bus=1e9").output
    assert '"across_bus": 1000000000' in slow and "given: across_bus=1e9" in slow


def test_the_docs_say_what_it_says_of_one_model():
    output = run("--parameters", "6.66e9", "--gpus", "512", "--network", "h100-3200g").output
    rows = re.findall(r"^ +(\d+ (?:FSDP|HSDP) \S+) +(\S+) +([\d.]+)", output, re.M)
    flat, coded, hybrid = (
        round({(layout, wire): float(ms) for layout, wire, ms in rows}[key])
        for key in (("512 FSDP 1x512", "bf16"), ("512 FSDP 1x512", "int8/e4m3"), ("512 HSDP 8x64", "bf16"))
    )
    guide = " ".join((Path(__file__).parents[2] / "docs/communication.md").read_text().split())
    said = f"HSDP of 64 ranks a copy without compression ({hybrid} ms) beats flat FSDP ({flat} ms) and flat FSDP in 8 bits ({coded} ms)"
    assert said in guide


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--parameters"),
        (["--parameters", "7e9", "--gpu", "h1000"], "h100"),
        (["--parameters", "7e9", "--network", "ib"], "h100-3200g"),
        (["--parameters", "7e9", "--gpus", "many"], "64..16384"),
        (["--parameters", "7e9", "--set", "acros_bus=1"], "across_bus"),
        (["--parameters", "7e9", "--set", "across_bus=fast"], "not a number"),
        (["--parameters", "7e15", "--gpus", "64"], "do not hold"),
        (["--parameters", "7e9", "--gpus", "0"], "0 is not an integer of at least 2."),
        (["--parameters", "7e9", "--gpus", "512..64"], "runs backwards. Write 64..512."),
        (["--parameters", "nan"], "--parameters: nan is not a number of at least 1."),
        (["--parameters", "7e9", "--tokens", "0"], "--tokens: 0 is not an integer of at least 1."),
        (["--parameters", "7e9", "--host-ms", "-1"], "--host-ms: -1.0 is not a number of at least 0"),
        (["--parameters", "7e9", "--mfu", "nan"], "--mfu: nan is not a number above 0"),
        (["--parameters", "7e9", "--tensor-parallel", "16"], "16 does not divide the 8 GPUs of a node"),
        (
            ["--parameters", "7e9", "--tensor-parallel", "0"],
            "--tensor-parallel: 0 is not an integer of at least 1.",
        ),
        (["--parameters", "7e9", "--set", "across_bus=-1"], "across_bus: -1 is not a number above 0."),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.integration
@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"algorithms": {"hybrid_sharding": {"shard": 8}}}, ["--gpus", "7"], "hybrid_sharding.shard: 8 does not divide the 7 ranks of this job. Shard degrees that do: 1, 7."),
        ({"fsdp_config": {"mixed_precision": "PURR"}}, ["--gpus", "8"], "fsdp_config.mixed_precision: 'PURR' is not one of PURE, DEFAULT, FULL"),
        ({"optimizer": {"name": "no_such"}}, ["--gpus", "8"], "optimizer: it cannot be built"),
        ({"device_train_microbatch_size": "auto"}, ["--gpus", "8"], "device_train_microbatch_size: 'auto' is not a number; give --tokens."),
    ],
)  # fmt: skip
def test_a_yaml_that_does_not_say_enough_is_refused_in_a_sentence(tmp_path, changes, options, said):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**MPT, "fsdp_config": {}, **changes}))
    result = run(str(file), *options)
    assert result.exit_code == 2 and said in result.output


@pytest.mark.integration
def test_the_named_optimizer_and_the_mixed_precision_are_counted(tmp_path):
    """8 GPUs of one node hold an eighth of parameters, gradients and states; Lion keeps one moment, FULL gathers float32."""
    file, found = tmp_path / "run.yaml", {}
    model = {**MPT["model"], "d_model": 1024, "vocab_size": 8192}
    for name, states in (("decoupled_adamw", 8), ("decoupled_lionw", 4)):
        for mixed, itemsize in (("DEFAULT", 2), ("FULL", 4)):
            options = {"fsdp_config": {"mixed_precision": mixed}, "optimizer": {"name": name, "lr": 1e-3}}
            file.write_text(yaml.safe_dump({**MPT, "model": model, **options}))
            config = read_yaml(file)
            work = workload_of(config, build_yaml_model(config, "meta"))
            assert work.optimizer_bytes == states and (work.parameter_bytes, work.gradient_bytes) == (
                itemsize,
                4,
            )
            found[states, itemsize] = layout(work, 8, 8, GPUS["h100"], NETWORKS["h100-3200g"])
            assert found[states, itemsize].memory_bytes == pytest.approx(
                work.parameters * (8 + states) / 8 + 2 * itemsize * work.parameters / 2
            )
    assert found[8, 4].communication_seconds > 1.3 * found[8, 2].communication_seconds
    model = build_yaml_model(config, "meta")
    frozen = max(model.parameters(), key=lambda p: p.numel()).requires_grad_(False).numel()
    work = workload_of(config, model)
    assert work.trained == pytest.approx(1 - frozen / work.parameters) and 0 < work.optimizer_bytes < 4


@pytest.mark.integration
def test_a_yaml_is_planned_without_its_tokenizer_and_without_a_gpu():
    pytest.importorskip("llmfoundry")
    path = Path(__file__).parents[2] / "yamls/pretrain/mpt-125m.yaml"
    result = run(str(path), "--gpus", "64")
    assert result.exit_code == 0, result.output
    assert "0.13 B parameters in 12 units" in result.output


@pytest.mark.integration
def test_a_yaml_s_tensor_parallelism_is_planned_as_if_it_shared_every_matrix():
    pytest.importorskip("llmfoundry")
    path = Path(__file__).parents[2] / "yamls/pretrain/fog-8b-16k.yaml"
    ours, alone = (run(str(path), "--gpus", "64", *more) for more in ((), ("--tensor-parallel", "4")))
    assert ours.exit_code == 0, ours.output
    assert "as if 2 GPUs shared every matrix" in ours.output
    assert "FSDP 1x32 TP 2" in ours.output and ours.output == alone.output  # the YAML says how many


@pytest.mark.integration
def test_a_token_passes_its_own_experts():
    """DBRX's shape: 132 billion parameters, 36 billion active on any input (Databricks' announcement of DBRX, 2024-03-27)."""
    pytest.importorskip("llmfoundry")
    config = read_yaml(Path(__file__).parents[2] / "yamls/pretrain/moe-132b.yaml")
    work = workload_of(config, build_yaml_model(config, "meta"))
    assert work.parameters == pytest.approx(132e9, rel=0.01)
    assert work.parameters - work.idle == pytest.approx(36e9, rel=0.02)
    assert work.flops == pytest.approx(
        6 * 36.5e9 * work.tokens + work.attention_flops * work.tokens, rel=0.01
    )
