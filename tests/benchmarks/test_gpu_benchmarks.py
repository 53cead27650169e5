"""The GPU benchmarks run from beginning to end without a GPU: ``--smoke``, under Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "column", "expected"),
    [
        (
            "quantize_gpu.py",
            "kernel",
            {"current, both layouts", "swiglu backward", "delayed update, whole model"},
        ),
        ("gemm_gpu.py", "gemm", {"fprop", "dgrad", "wgrad"}),
        (
            "context_gpu.py",
            "variant",
            {"bf16", "fp8 linears"},
        ),
        ("experts_gpu.py", "variant", {"bf16 one by one", "fp8 one by one", "fp8 grouped"}),
        ("step_gpu.py", "variant", {"bf16 eager", "native block unfused eager", "native delayed eager"}),
    ],
)
def test_smoke(script, column, expected, tmp_path):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--smoke"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["machine"]["smoke"] and expected <= {row[column] for row in result["rows"]}
    assert not any("failed" in row for row in result["rows"])
