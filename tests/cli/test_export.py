"""``foundry-fp8 export``: what is no checkpoint to serve is one sentence. Real ones: tests/integration, tests/models/mus."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from tests.export.served import save_checkpoint, stored

FP8 = {"repr": "FP8(recipe='current')", "recipe": {"name": "current"}, "version": 1, "modules": {}}


def checkpoint(**changes):
    return {
        "state": {"model": {}, "algorithms": [("FP8", FP8)], "metadata": {"precision": "fp32"}, **changes}
    }


def of_model(**values):
    return {"huggingface": {"model": {"config": {"content": values}}}}


@pytest.mark.parametrize(
    "content, said",
    [
        ([1, 2], "is not a checkpoint of Composer's trainer"),
        (checkpoint(algorithms=[]), "was not trained in FP8"),
        (checkpoint(algorithms=[("FP8", {"repr": "FP8(enabled=False)"})]), "was not trained in FP8"),
        (checkpoint(metadata={"precision": "amp_fp8"}), "was trained in precision amp_fp8"),
        (checkpoint(), "holds no Hugging Face model"),
        (checkpoint(integrations=of_model(model_type="t5")), "its model_type t5 is none that"),
        (checkpoint(integrations=of_model(model_type="mine")), "its model_type mine is none that"),
        (
            checkpoint(
                integrations=of_model(model_type="gpt2", n_layer=1, n_embd=32, n_head=2),
                model={"model.base_model.lora_A.weight": torch.zeros(1)},
            ),
            "lora_A.weight, .... It has LoRA adapters: merge them first",
        ),
    ],
    ids=["list", "no_fp8", "off", "precision", "no_model", "no_causal_lm", "unknown", "lora"],
)
def test_what_cannot_be_served_says_why(content, said, tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    result = CliRunner().invoke(app, ["export", str(path), str(tmp_path / "out")])
    assert result.exit_code == 2 and said in result.output, result.output
    assert not (tmp_path / "out").exists()


def test_the_options_of_the_run_decide_what_is_fp8(tmp_path):
    model = save_checkpoint(tmp_path / "checkpoint.pt")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "checkpoint.pt"), str(tmp_path / "out")])
    assert result.exit_code == 0 and "5 linears" in result.output, result.output
    config, tensors = stored(tmp_path / "out")
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16" and config["quantization_config"][
        "ignore"
    ] == [
        "lm_head",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
    ]
    name = "model.layers.0.mlp.down_proj"
    weight = model.get_parameter(f"{name}.weight").detach().bfloat16().float()
    scale = 448 / weight.abs().max()
    assert float(tensors[f"{name}.weight_scale"]) == float(scale.reciprocal())
    assert torch.equal(tensors[f"{name}.weight"].float(), (weight * scale).to(torch.float8_e4m3fn).float())
    assert f"{name}.input_scale" not in tensors


def test_a_sharded_checkpoint_says_how_to_make_it_whole(tmp_path):
    result = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "out")])
    assert result.exit_code == 2 and "dcp_to_torch" in result.output


def test_a_broken_file_is_said_to_be_one(tmp_path):
    path = tmp_path / "broken.pt"
    path.write_bytes(b"no checkpoint")
    result = CliRunner().invoke(app, ["export", str(path), str(tmp_path / "out")])
    assert result.exit_code == 2 and "cannot be read as a checkpoint" in result.output


class Code:
    """Unpickling it runs what its maker liked."""

    def __reduce__(self):
        return (os.mkdir, ("ran",))


def test_code_in_a_checkpoint_runs_only_for_who_trusts_it(tmp_path):
    save_checkpoint(tmp_path / "checkpoint.pt")
    content = torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    torch.save(
        {**content, "rng": [np.random.default_rng(0).integers(9, size=3), np.float64(1)]}, tmp_path / "own.pt"
    )
    torch.save({**content, "more": Code()}, tmp_path / "foreign.pt")

    def export(name, *more):
        return CliRunner().invoke(
            app, ["export", str(tmp_path / name), str(tmp_path / "out"), "--force", *more]
        )

    assert export("own.pt").exit_code == 0
    refused = export("foreign.pt")
    assert refused.exit_code == 2 and "--trust" in refused.output and not Path("ran").exists()
    assert export("foreign.pt", "--trust").exit_code == 0 and Path("ran").exists()
