from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.launch import run


@pytest.mark.multiprocess
def test_checkpointing_and_compression_under_ddp_fsdp1_fsdp2():
    worker = Path(__file__).with_name("run_memory.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(worker),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.count("all good") == 2


@pytest.mark.multiprocess
def test_composer_or_the_algorithm_wraps_the_chosen_modules_only(tmp_path):
    results = run("run_memory_composer.py", 2, imports="torch.distributed.fsdp,composer,transformers")
    assert len(results) == 13
    for label, (ours, plain) in results.items():
        names, reentrant, loss, total = ours
        assert [name.split("inner.")[1] for name in names] == ["model.layers.0", "model.layers.2.mlp"], label
        assert not any(reentrant), label
        if "compressed" in label:
            assert loss == pytest.approx(plain[2], rel=1e-3), label
        else:
            assert (loss, total) == (plain[2], plain[3]), label
