"""Runs real_te/*_cases.py once for each release of Transformer Engine, in a process that pretends to have a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RELEASES = (*(pytest.param(release, marks=pytest.mark.full) for release in ("2.4.0", "2.8.0")), "2.20.2")
"""The oldest supported, the last but one with the old spelling of autocast, the newest with the new one."""


@pytest.mark.parametrize("release", RELEASES)
def test_backend_over_the_python_of_transformer_engine(release, te_wheel):
    pytest.importorskip("onnx")  # Transformer Engine's Python imports it
    environment = {**os.environ, "TE_WHEEL": str(te_wheel(release)), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    # What the environment would otherwise decide, set against us: the recipe alone has to decide.
    environment |= {"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    environment |= {"NVTE_BACKWARD_OVERRIDE": "high_precision"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "real_te.plugin"]
    command += map(str, sorted((HERE / "real_te").glob("*_cases.py")))
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
