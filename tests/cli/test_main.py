import subprocess
import sys

import pytest
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from tests.report.logs import END, batches, header, write_log

# Not torch: the plans need it.
SLOW_IMPORTS = (
    "torch._dynamo",
    "triton",
    "composer",
    "llmfoundry",
    "streaming",
    "transformers",
    "matplotlib",
)


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    return result.exit_code, " ".join(result.output.split())


def test_help_imports_nothing_slow():
    code = f"import sys, foundry_fp8.cli.main; print([m for m in {SLOW_IMPORTS!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def test_every_command_is_mounted():
    code, output = run("--help")
    assert code == 0
    for command in ("demo", "compare", "doctor"):
        assert f" {command} " in output


def test_an_unknown_recipe_is_refused_before_anything_is_done(tmp_path):
    code, output = run("demo", "--recipes", "delayd", "--output", str(tmp_path / "out"))
    assert code == 2
    assert "--recipes: 'delayd' is not a recipe" in output
    assert "Did you mean 'delayed'?" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["mxfp8+attention", "delayed+attn", "delayed+"])
def test_an_attention_that_there_is_not_is_refused_before_anything_is_done(name, tmp_path):
    code, output = run("demo", "--recipes", name, "--output", str(tmp_path / "out"))
    assert code == 2
    assert f"--recipes: '{name}'" in output and "+attention, after delayed or current" in output
    assert not (tmp_path / "out").exists()


def test_an_unknown_model_is_refused(tmp_path):
    code, output = run("demo", "--model", "fog-mx", "--output", str(tmp_path / "out"))
    assert code == 2
    assert (
        "--model: 'fog-mx' is not one of mpt-gqa, fog-max" in output and "Did you mean 'fog-max'?" in output
    )


def test_a_missing_yaml_or_corpus_is_named(tmp_path):
    code, output = run("demo", "--yaml", "nowhere.yaml", "--output", str(tmp_path / "out"))
    assert (code, output) == (2, "--yaml: there is no nowhere.yaml.")
    code, output = run("demo", "--corpus", str(tmp_path), "--output", str(tmp_path / "out"))
    assert code == 2
    assert "holds no Python source files" in output


def test_compare_prints_the_table_and_writes_the_page(tmp_path):
    for name, recipe, speed in (("bf16", None, 100.0), ("fp8", "delayed", 120.0)):
        write_log(tmp_path / name / "run_log.jsonl", [header(name, recipe), *batches([2.0] * 20, speed), END])
    out = tmp_path / "report"
    code, output = run("compare", str(tmp_path / "fp8"), str(tmp_path / "bf16"), "--output", str(out))
    assert code == 0
    assert "+20.0" in output
    assert output.index("bf16") < output.index("fp8")
    assert (out / "report.html").exists()
    assert (out / "loss.png").exists()


def test_compare_names_a_run_that_is_not_there(tmp_path):
    code, output = run("compare", str(tmp_path / "nothing"))
    assert code == 2
    assert "There is no" in output
