"""The number of a storage, by which tables find what they know of it.

Cause: tensors that share memory are recognised by their storage, and torch has no public number for one: addresses are 0 for fake and meta
tensors and for empty ones. But a storage keeps its Python object as long as it lives, whoever else drops it
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/csrc/Storage.cpp, ``THPStorage_tryPreserve``), so ``id`` is one, and a weak
reference shows whether it is still the same storage. torch does not document that. Remove when it does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from foundry_fp8.config.versions import moved

__all__ = ["storage_number"]

storage_number: Callable[[torch.UntypedStorage], int] = id
"""A number that no other living storage has; a later one may. Python's ``id`` itself: layers ask it in every forward."""


def _changed() -> bool:
    """Whether a storage's object does not live exactly as long as the storage."""
    x = torch.zeros(2, dtype=torch.float32, device="cpu")
    seen = weakref.ref(x.untyped_storage())
    view = x[1:]
    del x
    if seen() is None or seen() is not view.untyped_storage():
        return True
    del view
    return seen() is not None


if _changed():
    said = "no longer keeps the Python object of a storage as long as the storage lives"
    raise moved(f"{said}. By it foundry_fp8 knows which tensors share memory", "storages")
