"""``doctor`` and ``plan`` on the folder of a Hugging Face model, with Composer or without it."""

import json
import re

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from tests.planned_options import plan_only


@pytest.fixture
def folder(tmp_path):
    # Of layers that are wide enough to be faster in FP8 on a GPU, which is what a plan is for.
    wide = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(max_position_embeddings=32, **wide, **heads).save_pretrained(tmp_path / "model")
    arguments = {"per_device_train_batch_size": 2, "bf16": True, "fsdp": ["full_shard"]}
    (tmp_path / "model" / "training_args.json").write_text(json.dumps(arguments))
    return tmp_path / "model"


def test_doctor_says_what_would_be_converted_and_memory_is_planned(folder, monkeypatch):
    plan_only(monkeypatch)
    done = CliRunner().invoke(app, ["doctor", str(folder)])
    assert done.exit_code == 0 and "14 of 15 linears" in done.output and "run_log" not in done.output
    assert "over 8 ranks" in done.output
    for command in (["plan", "speed", str(folder)], ["plan", "communication", str(folder), "--gpus", "8"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0 and re.search(r"(?m)^ *(BF16 +)?8 ", done.output), done.output
    done = CliRunner().invoke(app, ["plan", "memory", str(folder), "--budget", "1.0", "--device", "fake"])
    assert done.exit_code == 0 and "model: 2 x 32 tokens" in done.output and "algorithms:" in done.output


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "cannot be read"),
        ("config.json", '{"model_type": "nonesuch"}', "no causal language model can be built"),
        ("training_args.json", '{"deepspeed": "zero3.json"}', "deepspeed"),
    ],
)
def test_what_is_no_such_folder_is_one_sentence(folder, file, content, said):
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    done = CliRunner().invoke(app, ["doctor", str(folder)])
    assert done.exit_code == 2 and said in done.output
