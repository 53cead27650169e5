"""Transformer Engine's pure-Python wheels, downloaded once; tests skip with the reason where they cannot be had."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "foundry_fp8" / "transformer_engine"


@pytest.fixture(scope="session")
def te_wheel():
    """`te_wheel(version)`: the folder that holds that version's unpacked wheel."""
    return _unpacked


def _unpacked(version: str) -> Path:
    target = CACHE / version
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--retries=1", "--timeout=10", f"--dest={folder}", f"transformer-engine=={version}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the wheel of transformer-engine {version} did not download in 120 s")
        wheels = list(Path(folder).glob("*.whl"))
        if not wheels:
            said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"the wheel of transformer-engine {version} cannot be had: {said}")
        unpacked = Path(folder) / "unpacked"
        zipfile.ZipFile(wheels[0]).extractall(unpacked)
        try:
            unpacked.rename(target)
        except OSError:  # another process was faster
            assert target.exists()
    return target
