"""What the host path remembers of its launches, out of the way of a test that exchanges kernels."""

import importlib
import pkgutil

from foundry_fp8 import kernels
from foundry_fp8.kernels.launch import Remembered


def remember_nothing(monkeypatch):
    """Until ``monkeypatch`` is undone, launches are remembered apart: those of before hold other kernels (compiled or interpreted)."""
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        for name, value in list(vars(module).items()):
            if isinstance(value, Remembered):
                monkeypatch.setattr(module, name, Remembered())
