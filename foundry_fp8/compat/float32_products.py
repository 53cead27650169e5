"""Float32 matrix products of tensors that hold bfloat16 values, on bfloat16 (or TF32) units.

Cause: torch multiplies bfloat16 operands into a bfloat16 result only, and loses the float32 sums that the units made. They
can be had by handing the operands over as float32 tensors and allowing torch to narrow them, which is exact for what is a
bfloat16 value already. torch keeps that permission in a setting of the process, not of the call. So it is set for one
product and put back after it, and products that want different settings wait for each other; a float32 product that another
thread starts at that moment may be narrowed too.
Remove when ``torch.mm(a, b, out_dtype=torch.float32)`` takes bfloat16 operands on a CPU (torch 2.11: on CUDA alone).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["float32_products"]

_lock = threading.Lock()
# torch 2.9 and later: a setting for each kind of device, and reading the old one raises once both were used.
_PER_DEVICE: dict[str, tuple[Any, str]] = {}
if hasattr(torch.backends.mkldnn, "matmul") and hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    _PER_DEVICE = {
        "cpu": (torch.backends.mkldnn.matmul, "bf16"),
        "cuda": (torch.backends.cuda.matmul, "tf32"),
    }


@contextmanager
def float32_products(device_type: str, *, narrow: bool) -> Iterator[None]:
    """Whatever the user set, float32 products inside may narrow their operands to bfloat16 or TF32, or do not.

    Args:
        device_type: Where they run; on others than ``cpu`` and ``cuda`` nothing changes.
        narrow: The operands hold bfloat16 values, so that narrowing changes nothing but the speed.
    """
    if device_type not in ("cpu", "cuda"):
        yield
        return
    with _lock:
        if _PER_DEVICE:
            setting, name = _PER_DEVICE[device_type]
            before = setting.fp32_precision
            setting.fp32_precision = name if narrow else "ieee"
            try:
                yield
            finally:
                setting.fp32_precision = before
        else:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("medium" if narrow else "highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(before)
