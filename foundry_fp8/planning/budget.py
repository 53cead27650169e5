"""What a memory budget may say, and how bytes are written."""

from __future__ import annotations

import re
from typing import Any

from foundry_fp8.config import ConfigError

__all__ = ["FIT_SHARE", "check_budget", "fit_bytes", "format_bytes", "parse_bytes"]

FIT_SHARE = 0.95
"""Of what a device has for this process: the allocator rounds blocks up and its cache fragments."""

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def check_budget(budget: Any, key: str) -> None:
    """Raise :class:`ConfigError` unless ``budget`` is a size, a fraction in (0, 1], or ``fit``."""
    if isinstance(budget, float) and 0.0 < budget <= 1.0:
        return
    if isinstance(budget, str) and budget == "fit":
        return
    if isinstance(budget, str):
        parse_bytes(budget, key)
        return
    raise ConfigError(
        f"{key}: {budget!r} is not a size (20GiB), a fraction of what no checkpointing needs (0.4), or fit."
    )


def parse_bytes(text: str, key: str) -> int:
    """``"20GiB"`` in bytes.

    Raises:
        ConfigError: Not a number with one of B, KiB, MiB, GiB, KB, MB, GB.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f"{key}: {text!r} is not a size. Write a number and one of {', '.join(_UNITS)}.")
    return int(float(match[1]) * _UNITS[match[2]])


def fit_bytes(free: int, reserved: int) -> int:
    """What ``fit`` allows a step to hold.

    Args:
        free: Bytes of the device that nobody holds, as ``torch.cuda.mem_get_info`` says.
        reserved: Bytes that this process's allocator holds, in use or cached: the plan's peak counts what is in use.
    """
    return int(FIT_SHARE * (free + reserved))


def format_bytes(count: float) -> str:
    """``count`` bytes with a unit a person reads."""
    for unit in ("GiB", "MiB", "KiB"):
        if abs(count) >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.2f} {unit}"
    return f"{count:.0f} B"
