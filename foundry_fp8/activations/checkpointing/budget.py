"""What a memory budget may say."""

from __future__ import annotations

from typing import Annotated, Any

from foundry_fp8.config import ConfigError, Parse, parse_bytes

__all__ = ["FIT_SHARE", "Budget", "check_budget", "fit_bytes"]

WORDS = "a size (20GiB), a fraction of what no checkpointing needs (0.4), or fit"
FIT_SHARE = 0.95
"""Of what a device has for this process: the allocator rounds blocks up and its cache fragments."""


def check_budget(budget: Any, key: str) -> float | str:
    """``budget``; raises :class:`ConfigError` unless it is a size, a fraction in (0, 1], or ``fit``."""
    if isinstance(budget, float) and 0.0 < budget <= 1.0:
        return budget
    if isinstance(budget, str) and budget == "fit":
        return budget
    if isinstance(budget, str) and budget[-1:].isalpha():  # a bare number could be bytes or a share
        if parse_bytes(budget, key) == 0:
            raise ConfigError(f"{key}: {budget!r} is no memory at all.")
        return budget
    raise ConfigError(f"{key}: {budget!r} is not {WORDS}.")


Budget = Annotated[float | str, Parse(check_budget, WORDS)]


def fit_bytes(free: int, reserved: int) -> int:
    """What ``fit`` allows a step to hold.

    Args:
        free: Bytes of the device that nobody holds, as ``torch.cuda.mem_get_info`` says.
        reserved: Bytes that this process's allocator holds, in use or cached: the plan's peak counts what is in use.
    """
    return int(FIT_SHARE * (free + reserved))
