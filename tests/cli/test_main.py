import importlib
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foundry_fp8.cli.main import COMMANDS, app
from tests.report.logs import END, batches, header, write_log

CHECKOUT = Path(__file__).parents[2]


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    return result.exit_code, " ".join(result.output.split())


def imported(*arguments):
    """The modules that a call of the command line imports."""
    code = """if True:
        import sys
        from foundry_fp8.cli.main import app
        try:
            app(sys.argv[1:])
        except SystemExit as end:
            print("left", end.code)
        print("imported", *sys.modules)
    """
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
    )
    *_, left, modules = result.stdout.strip().splitlines()
    assert left in ("left 0", "left None"), result.stdout
    return set(modules.split())


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("plan", "--help")], ids=" ".join)
def test_help_and_version_need_no_torch(arguments):
    assert not imported(*arguments) & {
        "torch",
        "numpy",
        "rich.markdown",
        "composer",
        "llmfoundry",
        "transformers",
        "matplotlib",
    }


def test_init_needs_no_torch(tmp_path):
    pytest.importorskip("omegaconf")
    run = tmp_path / "run.yaml"
    shutil.copy(CHECKOUT / "yamls/pretrain/llama-3-8b.yaml", run)
    assert not imported("init", str(run), "--diff") & {"torch", "composer", "llmfoundry", "transformers"}


def commands():
    return [(group, name, *found) for group, table in COMMANDS.items() for name, found in table.items()]


@pytest.mark.parametrize(("group", "name", "file", "text"), commands(), ids=lambda value: value[:14])
def test_help_says_of_each_command_what_the_command_says(group, name, file, text):
    code, output = run(*(() if group == "foundry-fp8" else (group,)), "--help")
    assert code == 0 and f" {name} " in output
    if file:
        function = getattr(importlib.import_module(f"foundry_fp8.cli.{file}"), name)
        assert " ".join(inspect.getdoc(function).split("\n\n")[0].split()) == text


def test_a_mistyped_command_gets_its_nearest():
    for given, wanted in (("dctor", "doctor"), ("compair", "compare")):
        code, output = run(given)
        assert code == 2 and f"Did you mean '{wanted}'?" in output


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


class Absent:
    """Finds no LLM Foundry and no Composer."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("composer", "llmfoundry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_without_llm_foundry_a_command_says_what_it_needs(tmp_path, monkeypatch):
    """As beside Trainer and TRL, whose releases LLM Foundry does not take."""
    run = tmp_path / "run.yaml"
    run.write_text("{model: {name: mpt_causal_lm}, max_seq_len: 64}")
    for name in [name for name in sys.modules if name.split(".")[0] in ("composer", "llmfoundry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    for command in (
        ["doctor"],
        ["plan", "speed"],
        ["plan", "memory", "--budget", "0.5", "--microbatch", "1"],
    ):
        done = CliRunner().invoke(app, [*command, str(run)])
        assert done.exit_code == 2, done.output
        assert "It reads runs as LLM Foundry does: pip install 'foundry_fp8[stack]'" in done.output
