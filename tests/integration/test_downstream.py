"""Downstream tasks by LLM Foundry's own evaluation, in FP8 and in high precision, from the YAML to the page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from foundry_fp8.report.runs import read_run
from tests.data.test_tasks import TASKS, document, write_tasks

ROOT = Path(__file__).parents[2]
YAML = ROOT / "examples" / "downstream.yaml"


@pytest.mark.integration
def test_foundry_scores_the_yamls_tasks_on_a_model_in_fp8(tmp_path, monkeypatch):
    """Its multiple choice is that of the model's own mean log-likelihoods."""
    from llmfoundry.utils.builders import build_composer_model, build_icl_evaluators, build_tokenizer

    from foundry_fp8.data.tokenizer import train_tokenizer
    from foundry_fp8.surgery.apply import apply_fp8
    from tests.integration.foundry_runs import MPT

    documents = [document(number) for number in range(6)]
    train_tokenizer([d.text for d in documents], 320, tmp_path / "tokenizer")
    write_tasks(tmp_path / "tasks", documents, 6)
    config = OmegaConf.load(YAML)
    config.variables.data, config.variables.tasks = str(tmp_path), str(tmp_path / "tasks")
    values = OmegaConf.to_container(config, resolve=True)
    assert [task["label"] for task in values["icl_tasks"]] == list(TASKS)
    monkeypatch.chdir(tmp_path)  # Foundry copies the tasks to where it is started
    tokenizer = build_tokenizer(values["tokenizer"]["name"], values["tokenizer"]["kwargs"])
    evaluators, keys = build_icl_evaluators(values["icl_tasks"], tokenizer, 64, 24)
    assert [key.split("/")[1] for key in keys] == list(TASKS)
    torch.manual_seed(0)
    cfg = {key: value for key, value in MPT.items() if key != "name"}
    model = build_composer_model(name="mpt_causal_lm", tokenizer=tokenizer, cfg=cfg).eval()
    assert len(apply_fp8(model, recipe="current", backend="emulated").converted) == 8
    for evaluator, key in zip(evaluators, keys, strict=True):
        (batch,) = evaluator.dataloader.dataloader
        metric = model.get_metrics(is_train=False)[evaluator.metric_names[0]]
        with torch.no_grad():
            outputs = model.eval_forward(batch)
        model.update_metric(batch, outputs, metric)
        score = float(metric.compute())
        assert 0 <= score <= 1 and key.endswith("Accuracy")
        if key.split("/")[1] == "next_line":
            with torch.no_grad():
                logits = model(
                    {name: batch[name] for name in ("input_ids", "attention_mask")}
                ).logits.log_softmax(-1)
            likelihoods = [
                logits[row, span - 1, batch["input_ids"][row, span]].mean()
                for row, span in enumerate(batch["continuation_indices"])
            ]
            chosen = torch.stack(likelihoods).view(6, 4).argmax(1).tolist()
            assert score == pytest.approx(
                sum(a == b for a, b in zip(chosen, batch["gold_indices"], strict=True)) / 6
            )


@pytest.mark.integration
@pytest.mark.full
def test_the_yaml_and_its_twin_run_through_foundrys_train_and_their_scores_stand_on_the_page(tmp_path):
    (tmp_path / "corpus").mkdir()
    for number in range(60):
        made = document(number)
        (tmp_path / "corpus" / made.name).write_text(made.text)
    config = OmegaConf.load(YAML)
    config.variables.vocab_size, config.variables.tasks = 320, str(tmp_path / "tasks")
    write_tasks(tmp_path / "tasks", [document(number) for number in range(6)], 6)
    config.max_seq_len = 64
    config.model.update({"d_model": 64, "n_layers": 2})
    OmegaConf.save(config, tmp_path / "small.yaml")
    command = [sys.executable, "-m", "foundry_fp8.cli.main", "demo", "--steps", "4", "--recipes", "current", "--output", "out",
               "--yaml", "small.yaml", "--corpus", "corpus"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("-m llmfoundry.cli.cli train") == 2
    for name in ("high-precision", "current"):
        run = read_run(tmp_path / "out" / "runs" / name)
        assert run.problems == []
        assert {task: series.steps.tolist() for task, series in run.scores.items()} == {
            f"{t}/0-shot": [4] for t in TASKS
        }
        assert all(0 <= float(series.values[-1]) <= 1 for series in run.scores.values())
    found = json.loads((tmp_path / "out" / "report" / "comparison.json").read_text())["runs"]
    assert all(run["task_score"] is not None and run["held_out_loss"] is not None for run in found)
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert 'id="chart-tasks"' in page and "next_line/0-shot" in page and "Task score" in result.stdout
