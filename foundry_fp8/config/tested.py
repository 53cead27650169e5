"""Releases of other libraries that the tests of this package ran with: the oldest and the newest (``make test``, ``make test-newest``)."""

from __future__ import annotations

from foundry_fp8.config.versions import release

__all__ = ["TESTED", "TORCHES", "moved", "untested"]

TESTED = {
    "torch": ("2.7", "2.15"),
    "triton": ("3.3", "3.9"),
    "transformers": ("4.51", "5.24"),
    "accelerate": ("1.8", "1.15"),
    "peft": ("0.16", "0.21"),
    "mosaicml": ("0.32", "0.32"),
    "llm-foundry": ("0.22", "0.22"),
}
"""By the name in a package index."""

TORCHES = "Install a torch from {} to {}".format(*TESTED["torch"])
"""What to do where a private part of torch has moved."""


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
