import re

import pytest
import yaml
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from foundry_fp8.config import parse_bytes
from foundry_fp8.planning.memory import measure


def test_the_command_plans_an_mpt_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "CACHE_BYTES", 2**16)  # no matter here how exact its seconds are
    run = {
        "max_seq_len": 32,
        "device_train_microbatch_size": 2,
        "model": {"name": "mpt_causal_lm", "d_model": 64, "n_heads": 2, "n_layers": 3, "expansion_ratio": 2,
                  "max_seq_len": 32, "vocab_size": 128, "attn_config": {"attn_impl": "torch"},
                  "loss_fn": "torch_crossentropy"},
        "algorithms": {"activation_checkpointing": {"budget": 0.95}},
    }  # fmt: skip
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    done = CliRunner().invoke(app, ["plan", "memory", str(file)])
    assert done.exit_code == 0, done.output
    assert "run.yaml: 2 x 32 tokens" in done.output and "algorithms:" in done.output
    # Without allocating anything, and with a tokenizer that nobody has: MPT is built without it.
    run |= {"tokenizer": {"name": "no/such-tokenizer"}, "algorithms": {"fp8": {"recipe": "delayed"}}}
    file.write_text(yaml.safe_dump(run))
    done = CliRunner().invoke(app, ["plan", "memory", str(file), "--device", "fake", "--budget", "1.0"])
    assert done.exit_code == 0, done.output
    assert "run.yaml: 2 x 32 tokens" in done.output and "algorithms:" in done.output
    # Lion keeps one moment and Adam two; gradients are there from the start unless the step has one microbatch.
    one_layer = run | {"model": run["model"] | {"n_layers": 1}, "algorithms": {}}
    held = []
    for name, options in (("decoupled_adamw", []), ("decoupled_lionw", ["--no-accumulate"])):
        file.write_text(yaml.safe_dump(one_layer | {"optimizer": {"name": name, "lr": 1.0e-3}}))
        arguments = [
            "plan",
            "memory",
            str(file),
            "--device",
            "fake",
            "--compression",
            "none",
            "--budget",
            "1.0",
            *options,
        ]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        held.append(parse_bytes(re.search(r"optimizer state (.*)", done.output)[1], "held"))
    count = 128 * 64 + 32 * 64 + 4 * 64 * 64 + 2 * 2 * 64 * 64  # embeddings and matrices; the rest is small
    assert held[0] - held[1] == pytest.approx((4 + 4) * count, rel=0.05)
    # MPT's default attention needs a GPU, but its plan does not.
    del one_layer["model"]["attn_config"]
    file.write_text(yaml.safe_dump(one_layer))
    arguments = ["plan", "memory", str(file), "--device", "fake", "--compression", "none", "--budget", "1.0"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "attention holds flash attention's bytes" in done.output
