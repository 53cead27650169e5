"""Versions as numbers, those of what is installed, and those that the tests of this package ran with."""

from __future__ import annotations

import importlib.metadata

__all__ = ["TESTED", "TORCHES", "dotted", "installed", "moved", "release", "unpacked", "untested"]

TESTED = {
    "torch": ("2.7", "2.15"),
    "triton": ("3.3", "3.9"),
    "transformers": ("4.51", "5.24"),
    "accelerate": ("1.8", "1.15"),
    "peft": ("0.16", "0.21"),
    "mosaicml": ("0.32", "0.32"),
    "llm-foundry": ("0.22", "0.22"),
}
"""The oldest and the newest release (``make test``, ``make test-newest``), by the name in a package index."""

TORCHES = "Install a torch from {} to {}".format(*TESTED["torch"])
"""What to do where a private part of torch has moved."""


def installed(package: str) -> str | None:
    """The version of a package as pip reports it, without importing it; ``None`` where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def unpacked(number: int) -> tuple[int, ...]:
    """As NVIDIA's libraries pack them: ``90501`` -> ``(9, 5, 1)``."""
    return number // 10000, number // 100 % 100, number % 100


def release(version: str) -> tuple[int, ...]:
    """``"2.8.0+cu12"`` -> ``(2, 8, 0)``."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def dotted(version: tuple[int, ...]) -> str:
    """The other way."""
    return ".".join(map(str, version))


def moved(said: str, file: str) -> RuntimeError:
    """The error of a torch that is ``said`` to have moved what is private; by ``file`` of ``compat`` this package uses it."""
    import torch

    return RuntimeError(
        f"torch {torch.__version__} {said}. {TORCHES}, or adapt foundry_fp8/compat/{file}.py."
    )


def untested(package: str, version: str) -> str | None:
    """What to say of an installed ``version`` that is older or newer than any of a test run, or ``None``."""
    if package not in TESTED:
        return None
    oldest, newest = TESTED[package]
    if release(oldest) <= release(version)[:2] <= release(newest):
        return None
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    return f"not tested: this foundry_fp8 was with {tested}"
