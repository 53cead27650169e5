"""Every way that Transformer Engine's import was seen to fail becomes a reason and a remedy."""

import subprocess
import sys

import pytest

from foundry_fp8.backends.transformer_engine import library
from foundry_fp8.backends.transformer_engine.library import ImportProblem, explain
from foundry_fp8.config.versions import release


@pytest.mark.parametrize(
    ("version", "error", "reason", "remedy"),
    [
        (
            None,
            ModuleNotFoundError("No module named 'transformer_engine'"),
            "is not installed",
            "pip install",
        ),
        (
            "2.8.0",
            RuntimeError("0 active drivers ([]). There should only be one."),
            "import fails",
            "GPU machine",
        ),
        ("1.13.0", StopIteration(), "too old", "2.4 or later"),
        ("2.8.0", FileNotFoundError("transformer_engine_torch*.so"), "import fails", "extension is missing"),
        ("2.20.2", RuntimeError("cudart shared object not found"), "import fails", "CUDA toolkit"),
        ("2.20.2", RuntimeError("cuDNN version 9.5.1 is below 9.12"), "import fails", "2.4 to 2.19"),
        ("2.8.0", ImportError("undefined symbol: _ZN3c10"), "import fails", "another torch"),
        (
            "2.8.0",
            subprocess.CalledProcessError(1, "ldconfig -p | grep libnvrtc"),
            "import fails",
            "CUDA library",
        ),
        ("2.8.0", AssertionError(), "(AssertionError)", "Reinstall"),
    ],
)
def test_exceptions_are_explained(version, error, reason, remedy, monkeypatch):
    monkeypatch.setattr(library, "installed_version", lambda: version)
    problem = explain(error)
    assert reason in problem.reason and remedy in problem.remedy


PACKAGE = {
    "raises": ("raise StopIteration", "StopIteration"),
    "exits_with_assertion": ("assert False, 'sanity check'", "AssertionError: sanity check"),
}


@pytest.mark.parametrize("case", PACKAGE)
def test_a_broken_installation_never_raises(case, tmp_path, monkeypatch):
    if library.installed_version() is not None:
        pytest.skip("transformer-engine is installed on this machine")
    body, said = PACKAGE[case]
    for folder in ("transformer_engine", "transformer_engine/pytorch"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(body if folder.endswith("pytorch") else "")
    info = tmp_path / "transformer_engine-2.8.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.8.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        found = library.load_library.__wrapped__()
    finally:
        for module in [m for m in sys.modules if m.split(".")[0] == "transformer_engine"]:
            del sys.modules[module]
    assert said in found.reason and "2.8.0" in found.reason


def test_absent_here_unless_installed():
    if library.installed_version() is not None:
        pytest.skip("transformer-engine is installed on this machine")
    found = library.load_library()
    assert isinstance(found, ImportProblem) and "not installed" in found.reason


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.20.2", (2, 20, 2)), ("2.8.0+cu12", (2, 8, 0)), ("2.9.0.dev0", (2, 9, 0)), ("", ())],
)
def test_versions_compare_as_numbers(text, numbers):
    assert release(text) == numbers
