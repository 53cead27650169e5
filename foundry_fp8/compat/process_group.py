"""The time limit that a process group was made with, and the store by which the ranks of a job found each other.

Cause: torch's public API takes a limit where a group is made and has no way to ask for it afterwards; its backends keep it in their options
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/_C/_distributed_c10d.pyi, ``Backend.options``). It makes the store in
``init_process_group`` and has no public way to that either (``torch/distributed/distributed_c10d.py``, ``_get_default_store``). Remove
when it has both.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from foundry_fp8.config.versions import moved

__all__ = ["default_store", "group_timeout"]


def default_store() -> Any:
    """The store of the job's process group, with ``set``, ``get``, ``wait`` and ``check``.

    Raises:
        RuntimeError: This torch keeps it elsewhere.
    """
    find: Any = getattr(dist.distributed_c10d, "_get_default_store", None)
    store = None if find is None else find()
    if not all(hasattr(store, name) for name in ("set", "get", "wait", "check")):
        what = "torch.distributed.distributed_c10d._get_default_store"
        why = "Over it foundry_fp8 makes sure that all ranks ask for the same"
        raise moved(f"no longer has {what}. {why}", "process_group")
    return store


def group_timeout(group: dist.ProcessGroup | None = None) -> datetime.timedelta:
    """The longest time limit of the backends of ``group`` (of the job where ``None``).

    Raises:
        RuntimeError: This torch, or this backend, keeps it elsewhere.
    """
    found: Any = dist.group.WORLD if group is None else group
    try:
        return max(found._get_backend(device).options._timeout for device in found._device_types)
    except (AttributeError, RuntimeError) as error:
        said = f"keeps the time limit of a process group ({found}) where foundry_fp8 does not look: {error}"
        raise moved(f"{said}. Use gloo or nccl", "process_group") from error
