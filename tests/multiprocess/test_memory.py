from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


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
