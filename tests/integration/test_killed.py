"""What was whole before a run was killed is whole after it, whenever that is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.integration, pytest.mark.full]


def test_nothing_that_was_whole_is_lost_at_fifty_random_moments(tmp_path):
    pytest.importorskip("composer")
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "tests/integration/run_killed.py"),
        str(tmp_path),
        "50",
        "56",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=1500
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["lost"] == []
    assert all(found["read"].get(what) for what in ("steps", "checkpoints", "exports", "YAMLs")), found
