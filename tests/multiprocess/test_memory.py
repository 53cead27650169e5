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
def test_plans_for_fsdp_units():
    results = run("run_memory_plan.py", 2, imports="torch.distributed.fsdp,transformers")
    assert set(results) == {"fsdp1", "fsdp2"}
    for kind, found in results.items():
        assert len(found["predicted"]) > 20
        for option, (predicted, measured) in found["predicted"].items():
            assert predicted == pytest.approx(measured, rel=0.05), (kind, option)
        planned, fresh = found["losses"]
        assert planned == fresh, kind
        assert found["static"] == pytest.approx(found["unsharded"] / 2, rel=0.01), kind


@pytest.mark.multiprocess
def test_composer_or_the_algorithm_wraps_the_chosen_modules_only(tmp_path):
    results = run("run_memory_composer.py", 2, imports="torch.distributed.fsdp,composer,transformers")
    assert len(results) == 16
    for kind in ("ddp", "fsdp1", "fsdp2"):
        planned, plain = results.pop(f"{kind} budget")
        assert planned[0], f"{kind}: nothing was changed"
        assert planned[1] == pytest.approx(plain[2], rel=1e-3), kind
    for label, (ours, plain) in results.items():
        names, reentrant, loss, total = ours
        assert [name.split("inner.")[1] for name in names] == ["model.layers.0", "model.layers.2.mlp"], label
        assert not any(reentrant), label
        if "compressed" in label:
            assert loss == pytest.approx(plain[2], rel=1e-3), label
        else:
            assert (loss, total) == (plain[2], plain[3]), label
