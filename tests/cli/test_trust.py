"""Code of others runs for who gives --trust, in every command that could run it; and what cannot be read is said."""

import json
import os
import sqlite3

import pytest
import torch
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from foundry_fp8.report.runs import read_runs
from tests.planned_options import plan_only

MODEL = """
model: {{name: mpt_causal_lm, d_model: 32, n_heads: 2, n_layers: 1, max_seq_len: 32, vocab_size: 64, init_device: meta}}
max_seq_len: 32
device_train_microbatch_size: 1
algorithms: {{fp8: {{recipe: current, include: ["*"]}}}}
{more}
"""
COMMANDS = (["doctor"], ["doctor", "--probe"], ["policy"], ["policy", "--measure"], ["plan", "memory", "--device", "fake", "--budget", "20GiB"],
            ["plan", "communication", "--gpus", "64"])  # fmt: skip


def run(command, path, *more):
    split = 2 if command[0] == "plan" else 1
    return CliRunner().invoke(app, [*command[:split], str(path), *command[split:], *more])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_code_paths_run_only_for_who_trusts_them(command, tmp_path, monkeypatch):
    plan_only(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.py").write_text("import os; os.makedirs('ran', exist_ok=True)\n")
    (tmp_path / "run.yaml").write_text(MODEL.format(more="code_paths: [code.py]"))
    refused = run(command, "run.yaml")
    assert refused.exit_code == 2 and "code.py" in refused.output and "give --trust" in refused.output
    assert not os.path.exists("ran")
    if "--probe" not in command and "--measure" not in command:  # which need data
        done = run(command, "run.yaml", "--trust")
        assert done.exit_code == 0 and os.path.exists("ran"), done.output


@pytest.fixture
def folder(tmp_path):
    """A model whose config names code beside it."""
    made = tmp_path / "model"
    made.mkdir()
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (made / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (made / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    return made


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("where", ["model", "tokenizer"])
def test_the_code_of_a_folder_runs_only_for_who_trusts_it(command, where, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asked"))
    model = {
        "name": "hf_causal_lm",
        "pretrained_model_name_or_path": str(folder) if where == "model" else "gpt2",
    }
    tokenizer = {"name": str(folder) if where == "tokenizer" else "gpt2"}
    if where == "tokenizer":
        (folder / "config.json").rename(folder / "tokenizer_config.json")
    (tmp_path / "run.yaml").write_text(json.dumps({"model": model, "tokenizer": tokenizer, "max_seq_len": 32, "algorithms": {"fp8": {}}}))  # fmt: skip
    refused = run(command, tmp_path / "run.yaml")
    assert refused.exit_code == 2 and "config.json" in refused.output and "give --trust" in refused.output
    assert not (tmp_path / "ran").exists()


def test_the_folder_itself(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asked"))
    refused = run(["doctor"], folder)
    assert refused.exit_code == 2 and "give --trust" in refused.output and not (tmp_path / "ran").exists()
    run(["doctor"], folder, "--trust")
    assert (tmp_path / "ran").exists()


class Code:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return (os.mkdir, (self.folder,))


def test_a_checkpoint_to_measure_runs_no_code(tmp_path):
    from foundry_fp8.cli.probe import _load
    from foundry_fp8.config import ConfigError

    torch.save({"state": {"model": {}}, "more": Code(str(tmp_path / "ran"))}, tmp_path / "checkpoint.pt")
    with pytest.raises(ConfigError, match="--trust"):
        _load(torch.nn.Identity(), tmp_path / "checkpoint.pt", False)
    assert not (tmp_path / "ran").exists()
    _load(torch.nn.Identity(), tmp_path / "checkpoint.pt", True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", [*COMMANDS, ["init"]], ids=" ".join)
def test_a_deep_yaml_is_said_to_be_one(command, tmp_path):
    (tmp_path / "run.yaml").write_text("a: " + "[" * 2000 + "]" * 2000 + "\n" + MODEL.format(more=""))
    done = run(command, tmp_path / "run.yaml")
    # Of ours, or of PyYAML 6.0.4 ("maximum nesting depth").
    assert done.exit_code == 2 and "nest" in done.output


def test_mlflows_database_is_read_and_not_written(tmp_path):
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    file = tmp_path / "mlflow.db"
    with sqlite3.connect(file) as base:
        base.executescript("""
            CREATE TABLE runs (run_uuid TEXT, name TEXT, status TEXT, start_time INT, lifecycle_stage TEXT);
            CREATE TABLE metrics (key TEXT, value REAL, timestamp INT, run_uuid TEXT, step INT, is_nan INT);
            CREATE TABLE params (key TEXT, value TEXT, run_uuid TEXT);
            INSERT INTO runs VALUES ('2', 'later', 'FAILED', 2, 'active'), ('1', 'first', 'FINISHED', 1, 'active'),
                ('3', 'gone', 'FINISHED', 1, 'deleted'), ('4', 'an evaluation', 'FINISHED', 1, 'active');
            INSERT INTO metrics VALUES ('metrics/x', 1, 1, '4', 1, 0);
        """)
        for number in "123":
            rows = [("loss/train/total", 4 - step / 10, 1000 * step, number, step, 0) for step in range(1, 9)]
            rows[-1] = ("loss/train/total", 0, 8000, number, 8, 1)
            base.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
    before = file.read_bytes()
    runs = read_runs([tmp_path])
    assert [(r.name, r.status) for r in runs] == [("first", "finished"), ("later", "stopped: FAILED")]
    losses = [float(value) for value in runs[0].loss]
    assert losses[:2] == pytest.approx([3.9, 3.8]) and losses[-1] != losses[-1]
    assert file.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
    file.write_bytes(b"no database at all" * 99)
    with pytest.raises(ValueError, match="cannot be read as a database of MLflow"):
        read_runs([file])
