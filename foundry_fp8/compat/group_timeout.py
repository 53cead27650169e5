"""The time limit that a process group was made with.

Cause: torch's public API takes a limit where a group is made and has no way to ask for it afterwards. Its backends keep it in their
options (https://github.com/pytorch/pytorch/blob/v2.7.0/torch/_C/_distributed_c10d.pyi, ``Backend.options``). Remove when torch has a
public getter.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from foundry_fp8.config.tested import moved

__all__ = ["group_timeout"]


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
        raise moved(f"{said}. Use gloo or nccl", "group_timeout") from error
