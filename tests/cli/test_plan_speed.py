"""``foundry-fp8 plan speed``, and the line with which ``doctor`` ends."""

import re

import pytest
import yaml
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from foundry_fp8.cli.selftest import verdict
from tests.cli.test_plan_memory import MPT

WIDE = {"d_model": 2048, "n_heads": 16, "n_layers": 2, "vocab_size": 1024}


@pytest.fixture
def written(tmp_path):
    """A function that writes a YAML of an MPT, with ``algorithms.fp8`` and more of them, and gives its path."""

    def write(fp8=None, algorithms=None, **model):
        config = {
            **MPT,
            "model": {**MPT["model"], **model},
            "device_train_microbatch_size": 4,
            "global_train_batch_size": 64,
        }
        config["algorithms"] = {**(algorithms or {}), **({} if fp8 is None else {"fp8": fp8})}
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(config))
        return str(path)

    return write


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", "speed", *arguments])


def rows(output):
    found = re.findall(
        r"^(\w+) +(\d+) +(\d+) +[\d.]+%  (?:1$|([\d.]+) \(([\d.]+) to ([\d.]+)\))", output, re.M
    )
    return {(r, int(n)): (float(t), *(float(x) for x in rest if x)) for r, n, t, *rest in found}


def test_every_recipe_of_the_gpu_where_the_yaml_names_none(written):
    path = written(**WIDE)
    hopper, blackwell = (plan(path, "--gpu", gpu, "--gpus", "8,16").output for gpu in ("h100", "b200"))
    assert [r for r, n in rows(hopper) if n == 8] == ["BF16", "current", "delayed", "block"]
    assert [r for r, n in rows(blackwell) if n == 8] == ["BF16", "mxfp8", "delayed", "current", "block"]
    assert "8 of 8 linears gain from current" in hopper


def test_what_it_says_follows_from_its_own_tokens_per_second(written):
    output = plan(written({"recipe": "delayed"}, **WIDE), "--gpus", "8..16").output
    found = rows(output)
    assert set(found) == {(r, n) for r in ("BF16", "delayed") for n in (8, 16)}
    for gpus in (8, 16):
        tokens, faster, low, high = found["delayed", gpus]
        assert tokens / found["BF16", gpus][0] == pytest.approx(faster, abs=0.006) and low <= faster <= high


def test_a_faster_bf16_run_narrows_the_range(written):
    path = written({"recipe": "current"}, **WIDE)
    usual, fast = (
        rows(plan(path, "--gpus", "8", "--tokens", "65536", *more).output)["current", 8]
        for more in ((), ("--mfu", "0.6"))
    )
    assert fast[3] - fast[2] <= usual[3] - usual[2]


def test_auto_leaves_what_gains_nothing_and_says_why(written):
    small = {**WIDE, "d_model": 256}
    output = plan(written({"recipe": "auto"}, **small), "--gpus", "8").output
    assert "0 of 8 linears gain from current" in output and "too small to gain: 256 x 256" in output
    _, faster, *_ = rows(output)["current", 8]
    assert faster <= 1


def test_doctor_ends_with_what_the_plan_says(written):
    path = written({"recipe": "current"}, **WIDE)
    said = CliRunner().invoke(app, ["doctor", path, "--hardware", "h100x16"]).stdout
    _, faster, low, high = rows(plan(path, "--gpus", "16").output)["current", 16]
    assert said.rstrip().splitlines()[-1].split(maxsplit=2)[2] == (
        f"predicted on h100x16: {faster:.2f} x BF16, {low:.2f} to {high:.2f}; 8 of 8 layers gain; foundry-fp8 plan speed says more"
    )


@pytest.mark.parametrize(("recipe", "gpu"), [("nvfp4", "h100"), ("mxfp8", "l40s")])
def test_a_recipe_that_the_gpu_does_not_run_is_refused_as_doctor_refuses_it(recipe, gpu, written):
    path = written({"recipe": recipe}, **WIDE)
    said = f"{recipe} needs Blackwell; {gpu} runs current, delayed and block"
    result = plan(path, "--gpu", gpu)
    assert result.exit_code == 2 and said in result.output, result.output
    assert said in CliRunner().invoke(app, ["doctor", path, "--hardware", f"{gpu}x8"]).output


def test_nvfp4_is_planned_where_it_runs(written):
    found = rows(plan(written({"recipe": "nvfp4"}, **WIDE), "--gpu", "b200", "--gpus", "8").output)
    assert set(found) == {("BF16", 8), ("nvfp4", 8)}


def test_doctor_says_what_a_microbatch_that_composer_finds_leaves_open(written, tmp_path):
    path = written({"recipe": "current"}, **WIDE)
    config = yaml.safe_load((tmp_path / "run.yaml").read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**config, "device_train_microbatch_size": "auto"}))
    said = CliRunner().invoke(app, ["doctor", path, "--hardware", "h100x8"]).output
    assert "not predicted: device_train_microbatch_size: 'auto' is not a number; give --tokens" in said


def test_the_numbers_of_gpus_are_as_many_as_the_shards_of_the_yaml_where_those_are_more(written):
    def counts(**algorithms):
        output = plan(written({"recipe": "current"}, algorithms, **WIDE)).output
        return [gpus for recipe, gpus in rows(output) if recipe == "BF16"]

    assert counts() == [8, 64, 256]
    assert counts(hybrid_sharding={"shard": 4}) == [8, 64, 256]
    assert counts(hybrid_sharding={"shard": 32}) == [32, 256, 1024]


BLOCKS = {"targets": "mptblock"}


def test_checkpoints_are_those_of_the_yaml_whoever_sets_them(written, tmp_path):
    def plan_of(algorithms=None, fsdp=False):
        path = written({"recipe": "current"}, algorithms, **WIDE)
        config = yaml.safe_load((tmp_path / "run.yaml").read_text())
        (tmp_path / "run.yaml").write_text(
            yaml.safe_dump({**config, "fsdp_config": {"activation_checkpointing": fsdp}})
        )
        output = plan(path, "--gpus", "8", "--tokens", "65536").output
        return re.search(r"checkpoints add (\d+)% FLOPs", output)[1], rows(output)

    none = plan_of()
    every, half = (
        plan_of({"activation_checkpointing": {"targets": t}}) for t in ("mptblock", {"mptblock": 1})
    )
    assert every == plan_of(fsdp=True)
    assert none == plan_of({"activation_checkpointing": {**BLOCKS, "policy": "offload"}})
    # A block's forward has 16 H^2 FLOPs and 4 H 33 / 2 of attention, the head 2 H 1024.
    block, head = 16 * 2048**2 + 66 * 2048, 2 * 2048 * 1024
    assert (none[0], half[0], every[0]) == (
        "0",
        *(f"{100 * n * block / 3 / (2 * block + head):.0f}" for n in (1, 2)),
    )
    for key in none[1]:
        assert none[1][key][0] > half[1][key][0] > every[1][key][0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0.5}, "left out: algorithms.activation_checkpointing.budget"),
        (
            {**BLOCKS, "policy": ["aten.mm"]},
            "left out: algorithms.activation_checkpointing.policy: what runs again beside save aten.mm",
        ),
    ],
)
def test_checkpoints_whose_share_is_not_known_on_paper_are_named(options, said, written):
    path = written({"recipe": "current"}, {"activation_checkpointing": options}, **WIDE)
    result = plan(path, "--gpus", "8")
    assert said in result.output and "checkpoints add 0% FLOPs" in result.output, result.output
    doctor = CliRunner().invoke(app, ["doctor", path, "--hardware", "h100x8"]).stdout
    assert f"; {said}" in doctor.splitlines()[-1]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A function that keeps a self-test of this machine with rates."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def keep(rates):
        verdict.keep({"date": "2026-11-29T10:00:00", "claims": [], **rates})

    return keep


MEASURED = {"gpu": "NVIDIA H100 80GB HBM3", "bf16": 5e14, "fp8": 5.5e14, "block": 5e14, "triton_block": 5e14, "bandwidth": 2e12}  # fmt: skip
SAID = "bf16, fp8, block, triton_block, bandwidth as measured by this machine's self-test on 2026-11-29"


def test_what_this_machine_measured_replaces_the_rates_of_its_kind(written, kept):
    path = written({"recipe": "current"}, **WIDE)
    more = "--gpus", "8", "--tokens", "65536"
    table, other = (plan(path, "--gpu", gpu, *more).output for gpu in ("h100", "h200"))
    kept({"rates": MEASURED})
    output = plan(path, *more).output
    assert SAID in output and SAID not in table and "the shares that an H100's reach;" in table
    # FP8 is 1.1 times as fast as BF16 in its GEMMs now, and was 1.78 times.
    assert rows(output)["current", 8][1] < 1.06 < rows(table)["current", 8][1]
    assert plan(path, "--gpu", "h200", *more).output == other
    assert "8 of 8 linears gain" in table and "0 of 8 linears gain" in output
    assert "too small to gain: 2048 x" in output
    faster = rows(plan(path, "--gpus", "8").output)["current", 8][1]
    said = CliRunner().invoke(app, ["doctor", path, "--hardware", "h100x8"]).stdout
    assert f"predicted on h100x8: {faster:.2f} x BF16" in said and f"; {SAID}; 0 of 8 layers gain" in said


@pytest.mark.parametrize(
    "rates",
    [
        {},
        {"rates": None},
        {"rates": {**MEASURED, "gpu": "NVIDIA A100-SXM4-80GB"}},
        {"rates": {**MEASURED, "gpu": "NVIDIA H100 NVL"}},
        {"rates": {**MEASURED, "gpu": None}},
    ],
)
def test_a_self_test_without_rates_or_of_another_gpu_leaves_those_of_the_table(rates, written, kept):
    path = written({"recipe": "current"}, **WIDE)
    before = plan(path, "--gpus", "8").output
    kept(rates)
    assert plan(path, "--gpus", "8").output == before and "measured" not in before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "a100"], "a100 does not multiply FP8"),
        (["--gpu", "h1000"], "h100"),
        (["--network", "ib"], "h100-3200g"),
        (["--mfu", "1.5"], "--mfu"),
        (["--gpus", "many"], "64..16384"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, said, written):
    result = plan(written(**WIDE), *arguments)
    assert result.exit_code == 2 and said in result.output, result.output
