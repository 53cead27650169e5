"""Every code block of the README is carried out: YAML by LLM Foundry's builders, Python, and each command line."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


def commands():
    """Each command line, in the order in which they stand there, with continuation lines and comments taken off."""
    text = re.sub(r"```(yaml|python)\n.*?```", "", README, flags=re.S)
    starts = ("foundry-fp8 ", "composer ", "make ", "pip ", "python3 ", ".venv/", "sudo ", "python ")
    lines = [
        line.split("#")[0].strip()
        for line in text.splitlines()
        if line.startswith("    ") or line.startswith(starts)
    ]
    return [line for line in lines if line.startswith(starts)]


OURS = [line for line in commands() if line.startswith("foundry-fp8 ")]


@pytest.mark.parametrize("block", blocks("yaml"))
def test_yaml_is_taken_by_llm_foundry(block):
    from foundry_fp8.cli.run_check import _parts

    found, _ = _parts(yaml.safe_load(block))
    assert found and [finding.text for finding in found if finding.level != "ok"] == []


@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs(block, capsys):
    exec(compile(block, "README", "exec"), {"model": torch.nn.Sequential(torch.nn.Linear(64, 64))})
    assert "1 of 1 weights" in capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands are typed: a small run.yaml, two runs, a narrow proxy, and a checkpoint."""
    from tests.export.served import save_checkpoint
    from tests.integration.foundry_runs import config, make_data
    from tests.report.logs import END, batches, header, write_log

    root = tmp_path_factory.mktemp("readme")
    batch = {"global_train_batch_size": 16, "device_train_microbatch_size": 16}  # enough to plan with
    run = config(
        make_data(root),
        algorithms={"fp8": {"recipe": "current"}},
        precision="amp_bf16",
        run_name="mine",
        **batch,
    )
    (root / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    (root / "proxy.yaml").write_text((ROOT / "yamls" / "pretrain" / "mus-1b.yaml").read_text())
    save_checkpoint(root / "CHECKPOINT")
    for name, recipe in (("RUN_A", None), ("RUN_B", "current")):
        lines = [header(name, recipe), *batches([2.0] * 20), END]
        write_log(root / name / "run_log.jsonl", lines)
        write_log(root / "runs" / name / "run_log.jsonl", lines)
    return root


@pytest.mark.integration
@pytest.mark.parametrize(
    "line",
    [pytest.param(x, marks=[pytest.mark.full] if "plan memory" in x else []) for x in dict.fromkeys(OURS)],
)
def test_a_command_of_ours_succeeds(line, folder, monkeypatch):
    from foundry_fp8.cli.main import app

    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    if "selftest" in line and not torch.cuda.is_available():
        assert result.exit_code == 2 and "--dry" in result.output
    else:
        assert result.exit_code == 0, result.output


def test_every_other_command_is_of_a_kind_that_something_carries_out():
    """make and its targets: tests/test_docs.py; training: below; benchmarks: their files are there; pip and venv: ``make setup``."""
    for line in commands():
        words = shlex.split(line)
        if words[0] in ("make", "pip", "python3", "foundry-fp8") or words[0].startswith(".venv/"):
            continue
        if words[0] == "composer":
            assert words[1:7] == ["-n", "8", "-m", "llmfoundry.cli.cli", "train", "run.yaml"]
            continue
        script = next(word for word in words if word.endswith(".py"))
        assert (ROOT / script).exists(), line


@pytest.mark.integration
@pytest.mark.full
def test_from_a_yaml_to_a_page_as_the_readme_says(tmp_path):
    """The block itself, in processes of its own; ``composer -n 8`` is one process here, and the run is small."""
    from tests.integration.foundry_runs import config, make_data

    (block,) = [block for block in blocks("bash") if "fp8-report" in block]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [words[0] for words in lines] == [
        "pip",
        "foundry-fp8",
        "foundry-fp8",
        "composer",
        "composer",
        "foundry-fp8",
    ]
    run = config(make_data(tmp_path / "data"), algorithms={}, eval_interval=0)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    said = []
    for words in lines[1:]:
        program = ["-m", "foundry_fp8.cli.main"] if words[0] == "foundry-fp8" else []
        command = [sys.executable, *program, *(words[1:] if program else words[3:])]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, (words, result.stdout, result.stderr[-3000:])
        said.append(result.stdout + result.stderr)
    assert "FP8: 8 of 9 linears" in said[1] and "FP8: 8 of 9 linears" in said[2]
    assert "FP8: off" in said[3]
    assert said[4].startswith(("FP8 is fine: ", "FP8: cannot say, because the noise of bf16 "))  # four steps
    page = (tmp_path / "fp8-report" / "report.html").read_text()
    assert '<p class="verdict">FP8' in page and 'id="chart-loss"' in page
