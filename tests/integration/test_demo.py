"""``foundry-fp8 demo`` as a user starts it, made small."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from foundry_fp8.report.runs import read_run

ROOT = Path(__file__).parents[2]


@pytest.mark.integration
@pytest.mark.full
def test_the_demo_trains_compares_and_reports(tmp_path):
    rng = random.Random(0)
    words = ["def", "return", "self", "x", "y", "(", ")", ":", "\n", "import", "=", "1", "None"]
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(60):
        (corpus / f"m{i:02}.py").write_text(" ".join(rng.choices(words, k=2000)))
    config = OmegaConf.load(ROOT / "yamls" / "demo" / "mpt-gqa.yaml")
    config.variables.vocab_size = 320
    config.max_seq_len = 32
    config.model.update({"d_model": 64, "n_layers": 2})
    yaml = tmp_path / "small.yaml"
    OmegaConf.save(config, yaml)

    command = [sys.executable, "-m", "foundry_fp8.cli.main", "demo", "--steps", "6", "--recipes", "current"]
    command += [
        "--output",
        str(tmp_path / "out"),
        "--yaml",
        str(yaml),
        "--corpus",
        str(corpus),
        "--seed",
        "3",
    ]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    runs = {name: read_run(tmp_path / "out" / "runs" / name) for name in ("high-precision", "current")}
    for run in runs.values():
        assert run.problems == []
        assert run.step.tolist() == [1, 2, 3, 4, 5, 6]
        assert np.isfinite(run.eval_loss())
    assert runs["high-precision"].conversion is None
    # 4 linears in each of 2 blocks; the loss head is tied to the embedding, so it is no linear.
    assert sum(r["count"] for r in runs["current"].conversion["rows"] if r["action"] == "converted") == 8
    assert runs["current"].hyperparameters["seed"] == 3
    # Same weights and batches: the first losses differ by FP8's rounding alone, and they do differ.
    first, second = (runs[name].loss[0] for name in ("high-precision", "current"))
    assert first != second
    assert first == pytest.approx(second, rel=5e-3)
    assert "emulated, which does not show FP8's speed" in result.stdout and "% faster" not in result.stdout
    assert (tmp_path / "out" / "report" / "report.html").stat().st_size > 50_000
    assert (tmp_path / "out" / "report" / "loss.png").exists()
