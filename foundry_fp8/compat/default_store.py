"""The store by which the ranks of a job found each other.

Cause: torch makes it in ``init_process_group`` and has no public way to it afterwards
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/distributed_c10d.py, ``_get_default_store``). Remove when it has.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from foundry_fp8.config.tested import moved

__all__ = ["default_store"]


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
        raise moved(f"no longer has {what}. {why}", "default_store")
    return store
