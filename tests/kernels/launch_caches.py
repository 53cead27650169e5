"""What the host path remembers of its launches, out of the way of a test that exchanges kernels."""

import importlib
import pkgutil

from foundry_fp8 import kernels
from foundry_fp8.kernels.launch import BoundedCache


def use_empty_caches(monkeypatch):
    """Until ``monkeypatch`` is undone, launches are remembered apart: those of before hold other kernels (compiled or interpreted)."""
    names = [f"{kernels.__name__}.{info.name}" for info in pkgutil.iter_modules(kernels.__path__)]
    for name in (*names, "foundry_fp8.backends.native.passes"):
        module = importlib.import_module(name)
        for attribute, value in list(vars(module).items()):
            if isinstance(value, BoundedCache):
                monkeypatch.setattr(module, attribute, BoundedCache())
