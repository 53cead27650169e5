"""The largest microbatch that fits: dry runs hold what real steps hold, and one sequence more does not fit."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
import torch
import transformers
import yaml
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing
from foundry_fp8.activations.compression.apply import apply_activation_compression
from foundry_fp8.cli.cluster import cluster_of, limit_of
from foundry_fp8.cli.largest_microbatch import largest_that_fits
from foundry_fp8.cli.main import app
from foundry_fp8.cli.plan_memory import convert, fake, step_of, without_flash
from foundry_fp8.cli.yaml_model import build_yaml_model, optimizer_bytes_of, read_yaml
from foundry_fp8.cli.yaml_run import run_of
from foundry_fp8.compat.fake_tensor import FakeTensorMode
from foundry_fp8.config import parse_bytes
from foundry_fp8.gpus import GPUS
from foundry_fp8.planning.memory.cluster import on_cluster
from foundry_fp8.planning.memory.cost_model import CostModel
from foundry_fp8.planning.memory.flash_bytes import hold_flash_bytes
from foundry_fp8.planning.memory.live_bytes import LiveBytes
from foundry_fp8.planning.memory.planner import measure, measure_as_it_is
from tests.cli.test_plan_memory import FSDP, MPT

LENGTH = 2**16
MAKES_NO_MASK = int(transformers.__version__.split(".")[0]) < 5
"""transformers 5 makes a mask where it cannot look into the tokens; of small models that is a few per cent."""
H100 = GPUS["h100"].memory_bytes


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_what_trying_each_number_finds(seed):
    """Peaks are the largest of a few straight lines, as moments of a step are."""
    draw = torch.Generator().manual_seed(seed)
    starts, slopes = (torch.randint(1, high, (4,), generator=draw).tolist() for high in (1000, 60))
    limit = int(torch.randint(1, 5000, (), generator=draw))
    asked = []

    def peak(n):
        asked.append(n)
        return max(a + b * n for a, b in zip(starts, slopes, strict=True))

    for most in (1, 2, 7, 500):
        asked.clear()
        found = largest_that_fits(functools.cache(lambda n: (peak(n), 0.0)), limit, most)
        tried = list(asked)
        assert found == sum(peak(n) <= limit for n in range(1, most + 1))
        assert len(tried) <= 12


def test_on_a_line_three_peaks_are_asked_for():
    asked = []
    assert largest_that_fits(lambda n: asked.append(n) or (100 + 7 * n, 0.0), 800, 10**6) == 100
    assert asked == [1, 2, 100]


def llama(checkpoints=(), compression=None):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 2, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512, use_cache=False)).train()
    if checkpoints:
        apply_activation_checkpointing(model, targets=checkpoints)
    if compression:
        apply_activation_compression(model, format=compression, overrides={"loss": "none"})
    return model


def step(model, sequences):
    tokens = torch.zeros(sequences, 128, dtype=torch.long)
    return lambda: F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), tokens.flatten())


def bytes_of(measured):
    return [dataclasses.replace(costs["none"], seconds=0.0) for costs in measured.costs]


@pytest.mark.parametrize(
    ("checkpoints", "compression"),
    [
        pytest.param((), None, marks=pytest.mark.full),
        pytest.param((), "exact", marks=pytest.mark.full),
        pytest.param((), "int8", marks=pytest.mark.full),
        ({"LlamaDecoderLayer": "first-2"}, "int8"),
        pytest.param({"LlamaMLP": "last-3"}, None, marks=pytest.mark.full),
        pytest.param({"LlamaMLP": "last-3"}, "int4", marks=pytest.mark.full),
    ],
)
def test_a_dry_run_holds_what_a_real_step_holds(checkpoints, compression):
    dry = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = llama(checkpoints, compression)
        for n in (1, 2, 5):
            dry[n] = measure_as_it_is(model, step(model, n), CostModel())
    real = llama(checkpoints, compression)
    static = sum(t.nbytes for t in (*real.parameters(), *real.buffers()))
    step(real, 1)().backward()  # what a first step makes is there for the next
    for n, predicted in dry.items():
        real.zero_grad(set_to_none=True)
        with LiveBytes() as meter:
            step(real, n)().backward()
        assert predicted.peak("none") == pytest.approx(
            static + meter.peak, rel=0.03 if MAKES_NO_MASK else 0.05
        ), n
        held = measure_as_it_is(real, step(real, n), CostModel())
        if MAKES_NO_MASK:
            assert (predicted.frame, bytes_of(predicted)) == (held.frame, bytes_of(held))
        assert predicted.peak("none") == pytest.approx(held.peak("none"), rel=0.05)


@pytest.fixture
def written(tmp_path):
    def write(**more):
        model = {**MPT["model"], "d_model": 1024, "n_heads": 8, "vocab_size": 2048, "max_seq_len": LENGTH}
        config = {
            **MPT,
            **FSDP,
            "max_seq_len": LENGTH,
            "precision": "amp_bf16",
            "global_train_batch_size": 65536,
            **more,
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({**config, "model": {**model, **more.get("model", {})}}))
        return path

    return write


def planned(path):
    return CliRunner().invoke(app, ["plan", "speed", str(path), "--gpus", "8", "--largest-microbatch"]).output


def rows(output):
    found = re.findall(
        r"^(BF16|FP8) +(off|exact|int8|int4|e4m3) +(\d+) +([\d.]+) +(\d+) +[\d.]+$", output, re.M
    )
    return {(kind, form): (int(n), float(gb), int(rate)) for kind, form, n, gb, rate in found}


def peak_of_the_planner(path, sequences, fp8):
    """Of the option of ``plan memory`` that checkpoints nothing, on a rank of eight."""
    config = read_yaml(path)
    run = run_of(config, 8)
    without_flash(config)
    model = build_yaml_model(config, "meta")
    cluster, states = cluster_of(run, model, H100), optimizer_bytes_of(model, config)
    hold_flash_bytes(model)
    model.to(torch.bfloat16)
    with fake(model):
        device = torch.device("cpu")
        if fp8:
            convert(model, run, sequences * LENGTH, device)
        model.train()
        alone = measure(
            model, step_of(model, config, sequences, device), compression="none", cost_model=CostModel()
        )
        return on_cluster(alone, model, cluster, optimizer_bytes=states, accumulates=True).peak("none")


@pytest.mark.full
def test_the_planner_finds_that_it_fits_and_that_one_more_does_not(written):
    path = written(algorithms={"fp8": {"recipe": "current"}})
    found = rows(planned(path))
    assert set(found) == {(kind, form) for kind in ("BF16", "FP8") for form in ("off", "exact", "int8")}
    limit = parse_bytes(limit_of("h100"), "limit")
    for kind in ("BF16", "FP8"):
        sequences, gb, _ = found[kind, "off"]
        peak = peak_of_the_planner(path, sequences, kind == "FP8")
        assert peak <= limit < peak_of_the_planner(path, sequences + 1, kind == "FP8")
        assert gb == pytest.approx(peak / 1e9, abs=0.06)
        assert sequences < found[kind, "exact"][0] <= found[kind, "int8"][0]


@pytest.mark.full
def test_checkpoints_of_the_yaml_are_there_whoever_sets_them(written):
    most = {}
    for name, more in {
        "none": {},
        "algorithm": {"algorithms": {"activation_checkpointing": {"targets": "mptblock"}}},
        "fsdp": {"fsdp_config": {**FSDP["fsdp_config"], "activation_checkpointing": True}},
    }.items():
        most[name] = rows(planned(written(**more)))["BF16", "off"][0]
    assert most["none"] < most["algorithm"] == most["fsdp"]


def test_a_step_has_no_more_sequences_than_the_yaml_gives_it(written):
    # Composer's own optimizer looks at values, which nothing may in a dry run.
    optimizer = {
        "name": "decoupled_adamw",
        "lr": 1.0e-4,
        "betas": [0.9, 0.95],
        "eps": 1.0e-8,
        "weight_decay": 0.0,
    }
    short = {"max_seq_len": 1024, "model": {"max_seq_len": 1024}}
    output = planned(written(global_train_batch_size=16, optimizer=optimizer, **short))
    assert "of at most 2 sequences" in output and {n for n, *_ in rows(output).values()} == {2}


def test_where_not_one_sequence_fits_it_says_by_how_much(written):
    output = planned(written(model={"d_model": 2**15}))
    assert re.search(r"(?m)^BF16 +off +0 +[\d.]+ +one takes [\d.]+ GB too many$", output), output


def test_checkpoints_that_a_budget_chooses_are_refused(written):
    output = planned(written(algorithms={"activation_checkpointing": {"budget": 0.5}}))
    assert "Give it the targets that foundry-fp8 plan memory prints" in output
