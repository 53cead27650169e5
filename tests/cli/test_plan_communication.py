from pathlib import Path

import pytest
from typer.testing import CliRunner

from foundry_fp8.cli.main import app


def run(*arguments):
    return CliRunner().invoke(app, ["plan", "communication", *arguments])


def test_the_table_and_the_plot(tmp_path):
    result = run("--parameters", "7e9", "--gpus", "64..256", "--plot", str(tmp_path / "plan.png"))
    assert result.exit_code == 0, result.output
    assert result.output.count("FSDP 1x") >= 6 and "HSDP" in result.output
    assert "tuning.cc" in result.output  # the constants and their sources are printed
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_a_measured_constant_overrides():
    slow = run("--parameters", "7e9", "--gpus", "64", "--set", "across_bus=1e9").output
    assert '"across_bus": 1000000000' in slow and "given: across_bus=1e9" in slow


def test_published_points_are_printed_with_their_errors():
    output = run("--check").output
    assert "AWS 7B BF16" in output and "torchtitan" in output and "Assumed" in output
    points = [line for line in output.splitlines() if line[40:].strip() and "Assumed" not in line]
    guide = (Path(__file__).parents[2] / "docs/communication.md").read_text()
    assert len(points) > 28
    assert [line for line in points if line.rstrip() not in guide] == [
        points[-1]
    ]  # which is the note below the table


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--parameters"),
        (["--parameters", "7e9", "--gpu", "h100"], "h100-sxm"),
        (["--parameters", "7e9", "--network", "ib"], "h100-3200g"),
        (["--parameters", "7e9", "--gpus", "many"], "64..16384"),
        (["--parameters", "7e9", "--set", "acros_bus=1"], "across_bus"),
        (["--parameters", "7e9", "--set", "across_bus=fast"], "not a number"),
        (["--parameters", "7e15", "--gpus", "64"], "do not hold"),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.integration
def test_a_yaml_is_planned_without_its_tokenizer_and_without_a_gpu():
    pytest.importorskip("llmfoundry")
    yaml = Path(__file__).parents[2] / "yamls/pretrain/mpt-125m.yaml"
    result = run(str(yaml), "--gpus", "64")
    assert result.exit_code == 0, result.output
    assert "0.13 B parameters in 12 units" in result.output
