import os

# Before torch: with one process a core (pytest -n), more threads only fight. Nothing is fetched from a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


def pytest_configure(config):
    if not torch.__version__.startswith("2.7."):
        # The list of upstream's warnings in pyproject.toml is that of the pinned stack; past it they are shown, not raised.
        config.addinivalue_line("filterwarnings", "default")


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
