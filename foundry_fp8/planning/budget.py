"""What a memory budget may say, and how bytes are written."""

from __future__ import annotations

import re
from typing import Any

from foundry_fp8.config import ConfigError

__all__ = ["check_budget", "format_bytes", "parse_bytes"]

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


def format_bytes(count: float) -> str:
    """``count`` bytes with a unit a person reads."""
    for unit in ("GiB", "MiB", "KiB"):
        if abs(count) >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.2f} {unit}"
    return f"{count:.0f} B"
