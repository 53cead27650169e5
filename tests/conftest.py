import gc
import importlib.abc
import importlib.util
import os
import sys

# Before torch: with one process a core (pytest -n), more threads only fight. Nothing is fetched from a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


class _NotInstalled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Where Composer is missing (make test-trainers) a test that imports it, or what it brings, is skipped."""

    brings = ("composer", "llmfoundry", "streaming", "omegaconf")

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name.partition(".")[0] in self.brings else None

    def exec_module(self, module):
        pytest.skip(f"needs {module.__name__}: Composer is not installed here", allow_module_level=True)


if importlib.util.find_spec("composer") is None:
    sys.meta_path.append(_NotInstalled())


def pytest_configure(config):
    if not torch.__version__.startswith("2.7."):
        # The list of upstream's warnings in pyproject.toml is that of the pinned stack; past it they are shown, not raised.
        config.addinivalue_line("filterwarnings", "default")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """What is imported here stays: no search for garbage goes through these million objects, now or during the tests."""
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # runs write their log beside where they are started
