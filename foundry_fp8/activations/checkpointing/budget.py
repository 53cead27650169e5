"""What a memory budget may say."""

from __future__ import annotations

from typing import Any

from foundry_fp8.config import ConfigError, parse_bytes

__all__ = ["FIT_SHARE", "check_budget", "fit_bytes"]

FIT_SHARE = 0.95
"""Of what a device has for this process: the allocator rounds blocks up and its cache fragments."""


def check_budget(budget: Any, key: str) -> None:
    """Raise :class:`ConfigError` unless ``budget`` is a size, a fraction in (0, 1], or ``fit``."""
    if isinstance(budget, float) and 0.0 < budget <= 1.0:
        return
    if isinstance(budget, str) and budget == "fit":
        return
    if isinstance(budget, str):
        if parse_bytes(budget, key) == 0:
            raise ConfigError(f"{key}: {budget!r} is no memory at all.")
        return
    raise ConfigError(
        f"{key}: {budget!r} is not a size (20GiB), a fraction of what no checkpointing needs (0.4), or fit."
    )


def fit_bytes(free: int, reserved: int) -> int:
    """What ``fit`` allows a step to hold.

    Args:
        free: Bytes of the device that nobody holds, as ``torch.cuda.mem_get_info`` says.
        reserved: Bytes that this process's allocator holds, in use or cached: the plan's peak counts what is in use.
    """
    return int(FIT_SHARE * (free + reserved))
