"""Runs real_te/attention_cases.py for each release of Transformer Engine, in a process that pretends to have a GPU."""

import os
import subprocess
import sys

import pytest

from tests.backends.transformer_engine.test_real_te import HERE, RELEASES


@pytest.mark.parametrize("release", RELEASES)
def test_attention_over_the_python_of_transformer_engine(release, te_wheel):
    environment = {**os.environ, "TE_WHEEL": str(te_wheel(release)), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "real_te.plugin", str(HERE / "real_te" / "attention_cases.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
