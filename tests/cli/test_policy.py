"""``foundry-fp8 policy RUN.yaml``: what it prints is what a run does."""

from __future__ import annotations

import pytest
import yaml
from typer.testing import CliRunner

from foundry_fp8.cli.main import app

pytestmark = pytest.mark.integration
HIGH = "high_precision"
RULES = [
    {"blocks": "first-1", "recipe": HIGH},
    {"roles": ["mlp"], "recipe": "block", "gemms": {"wgrad": HIGH}},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    from tests.integration.foundry_runs import make_data

    return make_data(tmp_path_factory.mktemp("policy"))


def written(root, **fp8):
    from tests.integration.foundry_runs import config

    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(config(root, algorithms={"fp8": fp8} if fp8 else {}), sort_keys=False))
    return path


def policy(*arguments):
    return CliRunner().invoke(app, ["policy", *map(str, arguments)])


def test_it_prints_each_gemms_recipe_and_the_rule_without_weights(root):
    result = policy(written(root, recipe=RULES))
    assert result.exit_code == 0, result.output
    (up,) = [line for line in result.output.splitlines() if "blocks.1.ffn.up_proj" in line]
    assert [cell.strip() for cell in up.split("│")[2:6]] == [
        "block", "block", HIGH, "algorithms.fp8.recipe[1]",
    ]  # fmt: skip
    (first,) = [line for line in result.output.splitlines() if "blocks.0.ffn.up_proj" in line]
    assert "algorithms.fp8.recipe[0] leaves it" in first
    assert "2 of" in result.output.splitlines()[-1]


def test_a_wrong_rule_and_a_yaml_without_fp8_are_errors(root):
    result = policy(written(root, recipe=[{"modules": "*.upp_proj", "recipe": "block"}]))
    assert result.exit_code == 2 and "recipe[0].modules: pattern '*.upp_proj'" in result.output
    result = policy(written(root))
    assert result.exit_code == 2 and "algorithms.fp8: it is not in the YAML" in result.output


def test_measured_rules_can_be_pasted(root):
    path = written(root, recipe={"name": "measured", "error": 0.5}, keep_first_blocks=1)
    result = policy(path, "--measure")
    assert result.exit_code == 0, result.output
    assert "layer_001 mlp" in result.output and "limit 50%" in result.output
    pasted = yaml.safe_load(result.output[result.output.index("algorithms:") :])["algorithms"]["fp8"]
    assert pasted == {"recipe": [{"recipe": "delayed"}], "keep_first_blocks": 1}
    assert policy(written(root, **pasted)).exit_code == 0
    result = policy(written(root, recipe={"name": "measured", "error": 0.00001}), "--measure")
    assert (
        result.exit_code == 0 and "enabled: false" in result.output and "every recipe is off" in result.output
    )


def test_measuring_needs_data(root):
    path = written(root, recipe="measured")
    config = yaml.safe_load(path.read_text())
    del config["train_loader"]
    path.write_text(yaml.safe_dump(config))
    result = policy(path, "--measure")
    assert result.exit_code == 2 and "train_loader: it is missing, and --measure" in result.output


def test_it_prints_when_which_rule_holds(root):
    rules = [
        {"until": "1ba", "recipe": HIGH},
        {"from": "0.75dur", "recipe": "block", "gemms": {"fprop": HIGH}},
        {"recipe": "current"},
    ]
    result = policy(written(root, recipe=rules, backend="emulated"))
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    first = next(i for i, line in enumerate(lines) if "ffn.up_proj" in line)
    cells = [[cell.strip() for cell in line.split("│")[2:6]] for line in lines[first : first + 3]]
    keys = [f"algorithms.fp8.recipe[{i}]" for i in range(3)]
    assert cells == [
        [HIGH, HIGH, HIGH, f"{keys[0]} until 1ba"],
        [HIGH, "block", "block", f"{keys[1]} from 0.75dur"],
        ["current"] * 3 + [keys[2]],
    ]
    assert [line for line in lines if line.startswith("from ")] == [
        f"from 0ba on: {keys[0]}, {keys[2]}",
        f"from 1ba on: {keys[2]}",
        f"from 3ba on: {keys[1]}, {keys[2]}",
    ]
