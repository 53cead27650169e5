import yaml
from typer.testing import CliRunner

from foundry_fp8.cli.main import app


def test_the_command_plans_an_mpt_yaml(tmp_path):
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
    # MPT's default attention needs a GPU.
    del run["model"]["attn_config"]
    file.write_text(yaml.safe_dump(run))
    done = CliRunner().invoke(app, ["plan", "memory", str(file), "--device", "fake", "--budget", "1.0"])
    assert done.exit_code == 2 and "attn_impl: flash" in done.output
