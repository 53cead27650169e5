"""``foundry-fp8 doctor RUN.yaml --probe`` on a small run and its own data."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from typer.testing import CliRunner

from foundry_fp8.cli.main import app

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from tests.integration.foundry_runs import config, make_data

    root = tmp_path_factory.mktemp("probe")
    path = root / "run.yaml"
    cfg = config(make_data(root), algorithms={"fp8": {"recipe": "delayed"}})
    path.write_text(yaml.safe_dump(cfg, sort_keys=False))
    return path, cfg


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments), "--probe"])


def test_a_healthy_model_has_every_block_and_recipe_and_no_advice(run):
    result = doctor(run[0])
    assert result.exit_code == 0, result.output
    for text in ("all layers", "layer_000", "delayed", "current", "block", "No layer is above"):
        assert text in result.output


def test_the_layers_of_a_damaged_block_of_a_checkpoint_are_named(run, tmp_path):
    """One large element of a weight: the gradients of what is in front of it are sums of a few large products."""
    from foundry_fp8.cli.yaml_model import build_yaml_model, read_yaml

    torch.manual_seed(0)
    model = build_yaml_model(read_yaml(run[0]), "cpu")
    with torch.no_grad():
        model.get_submodule("model.transformer.blocks.0.ffn.down_proj").weight[0, 0] = 300.0
    torch.save({"state": {"model": model.state_dict()}}, tmp_path / "whole.pt")
    result = doctor(run[0], "--load", tmp_path / "whole.pt")
    assert result.exit_code == 0, result.output
    advice = result.output.split("exclude:")[1]
    assert "blocks.0." in advice and "blocks.1." not in advice


def test_the_same_as_json(run):
    found = json.loads(doctor(run[0], "--json").stdout)
    assert {"delayed", "current", "block"} <= found["errors"]["all layers"].keys() and found["layers"] == []


def changed(run, tmp_path, **keys):
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump({**run[1], **keys}, sort_keys=False))
    return doctor(path)


def test_of_rules_with_times_those_in_fp8_are_measured(run, tmp_path):
    rules = [{"until": "1ba", "recipe": "high_precision"}, {"recipe": "current"}]
    result = changed(run, tmp_path, algorithms={"fp8": {"recipe": rules}})
    assert result.exit_code == 0, result.output
    assert "current" in result.output and "No layer is above" in result.output


@pytest.mark.parametrize("key", ["tokenizer", "train_loader"])
def test_data_that_are_not_there_are_named(run, tmp_path, key):
    broken = dict(run[1][key], name="nowhere/to/be/found") if key == "tokenizer" else dict(run[1][key])
    if key == "train_loader":
        broken["dataset"] = {**broken["dataset"], "local": str(tmp_path / "nowhere")}
    result = changed(run, tmp_path, **{key: broken})
    assert result.exit_code == 2, result.output
    assert "no batch of them, which --probe needs" in result.output and "nowhere" in result.output


def test_a_checkpoint_without_the_probe_is_an_error(run):
    result = CliRunner().invoke(app, ["doctor", str(run[0]), "--load", str(run[0])])
    assert result.exit_code == 2 and "--probe" in result.output


@pytest.mark.parametrize("gone", ["algorithms", "train_loader", "tokenizer"])
def test_what_is_missing_is_named(run, tmp_path, gone):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in run[1].items() if k != gone}))
    result = doctor(path)
    assert result.exit_code == 2 and gone in result.output


def test_a_file_that_is_no_checkpoint(run, tmp_path):
    torch.save({"a": 1}, tmp_path / "other.pt")
    result = doctor(run[0], "--load", tmp_path / "other.pt")
    assert result.exit_code == 2 and "not a whole Composer checkpoint" in result.output
