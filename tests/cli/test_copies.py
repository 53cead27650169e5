"""Over how many ranks a copy of the model is sharded: ``doctor``, ``plan memory`` and training say the same."""

import re

import pytest
import yaml
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from tests.planned_options import plan_only

MODEL = {"name": "mpt_causal_lm", "d_model": 256, "n_heads": 2, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 32,
         "vocab_size": 4096}  # fmt: skip
BLOCK = (256 + 1) * (768 + 256 + 512) + (512 + 1) * 256 + 4 * 256  # qkv, out, up; down; two norms
ELEMENTS = (4096 + 32) * 256 + 2 * BLOCK + 2 * 256
"""Tokens, which are the head too, and positions; blocks; the last norm."""
HYBRID = {"hybrid_sharding": {}}
CASES = {  # fsdp_config, algorithms, and by the number of ranks how many of them share a copy, 8 of them on a node
    "DDP": (None, {}, {8: 1, 64: 1}),
    "FULL_SHARD": ({"sharding_strategy": "FULL_SHARD"}, {}, {8: 8, 64: 64}),
    "empty": ({}, {}, {8: 8, 64: 64}),
    "SHARD_GRAD_OP": ({"sharding_strategy": "SHARD_GRAD_OP"}, {}, {8: 8, 64: 64}),
    "NO_SHARD": ({"sharding_strategy": "NO_SHARD"}, {}, {8: 1, 64: 1}),
    "HYBRID_SHARD": ({"sharding_strategy": "HYBRID_SHARD"}, {}, {8: 8, 64: 64}),  # Composer's mesh is 1-D
    "HYBRID_SHARD, replicas": (
        {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 4}, {}, {8: 2, 64: 16}),
    "shards": ({"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": -1}, {}, {8: 4, 64: 4}),
    "hybrid, node": ({"sharding_strategy": "HYBRID_SHARD"}, {"hybrid_sharding": {"shard": "node"}}, {8: 8, 64: 8}),
    "hybrid, 4": ({"sharding_strategy": "FULL_SHARD"}, {"hybrid_sharding": {"shard": 4}}, {8: 4, 64: 4}),
    "hybrid, auto": ({"sharding_strategy": "FULL_SHARD"}, HYBRID, {8: 1, 64: 1}),  # a small model fits one GPU
    "hybrid, auto that is tight": (
        {}, {"hybrid_sharding": {"shard": "auto", "state_fraction": 2e-4}}, {8: 4, 64: 4}),
    "FSDP2, NO_SHARD": ({"sharding_strategy": "NO_SHARD"}, {}, {8: 8, 64: 64}),  # which FSDP2 does not read
    "FSDP2, no resharding": ({"reshard_after_forward": False}, {}, {8: 8, 64: 64}),
    "FSDP2, hybrid": ({}, {"hybrid_sharding": {"shard": "node"}}, {8: 8, 64: 8}),
    "feedback": (None, {"compressed_communication": {"gradients": "int8"}}, {8: 1}),
}  # fmt: skip


QUICK = {"DDP": 8, "FULL_SHARD": 64, "HYBRID_SHARD, replicas": 64, "hybrid, 4": 8, "FSDP2, hybrid": 64}
"""One of each way to say it, on as many ranks as tell it from the others; every case on all its ranks in the full tier."""


@pytest.mark.parametrize(
    ("name", "ranks", "shard"),
    [
        pytest.param(name, ranks, shard, marks=() if QUICK.get(name) == ranks else pytest.mark.full)
        for name, (_, _, shards) in CASES.items()
        for ranks, shard in shards.items()
    ],
)
def test_the_memory_of_doctor_and_of_the_plan_is_a_copy_over_its_ranks(
    name, ranks, shard, tmp_path, monkeypatch
):
    said, planned = doctor_and_plan(name, ranks, tmp_path, monkeypatch)
    assert planned.exit_code == 0, planned.output
    (ours, over) = re.search(r"parameters: (\S+ \w+) a GPU .* over (\d+) rank", said).groups()
    (theirs,) = re.search(r"parameters and optimizer state (\S+ \w+)", planned.output).groups()
    _, algorithms, _ = CASES[name]
    # In float32: a parameter, its gradient, its momentum; DDP's bucket; what a code of its gradient left over.
    kept = 4 * (3 + (shard == 1) + ("compressed_communication" in algorithms))
    for text in (ours, theirs):
        value, unit = text.split()
        size = {"KiB": 2**10, "MiB": 2**20}[unit]
        assert float(value) * size == pytest.approx(kept * ELEMENTS / shard, rel=0, abs=0.006 * size)
    assert int(over) == shard


@pytest.mark.parametrize("name", ["hybrid, node", "FSDP2, hybrid"])
def test_ranks_that_are_no_whole_nodes_are_refused_with_the_shards_that_fit(name, tmp_path, monkeypatch):
    said, planned = doctor_and_plan(name, 12, tmp_path, monkeypatch)
    assert "hybrid_sharding.shard: 8 does not divide the 12 ranks of this job." in said
    assert "hybrid_sharding.shard: 8 does not divide the 12 ranks of this job" in planned.output
    assert "Shard degrees that do: 1, 2, 3, 4, 6, 12." in planned.output


def doctor_and_plan(name, ranks, folder, monkeypatch):
    """What ``doctor`` says of a case on so many ranks, and the result of ``plan memory``."""
    fsdp, algorithms, _ = CASES[name]
    plan_only(monkeypatch)
    monkeypatch.setenv("FSDP_VERSION", "2" if "FSDP2" in name else "1")
    file = folder / "run.yaml"
    run = {"max_seq_len": 32, "device_train_microbatch_size": 1, "precision": "amp_bf16", "model": MODEL,
           "algorithms": {"fp8": {"recipe": "current", "include": ["*.down_proj"]}, **algorithms}, "optimizer": {"name": "decoupled_lionw", "lr": 1e-3}}  # fmt: skip
    file.write_text(yaml.safe_dump(run | ({} if fsdp is None else {"fsdp_config": fsdp})))
    said = CliRunner().invoke(app, ["doctor", str(file), "--hardware", f"h100x{ranks}"]).output
    options = ["--world-size", str(ranks), "--compression", "none"]
    return said, CliRunner().invoke(app, ["plan", "memory", str(file), *options])
