"""The verdict and the rates of a self-test: kept on this machine, and read by ``foundry-fp8 doctor run.yaml`` and plans."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry_fp8.config.files import write_file
from foundry_fp8.gpus import GPUS, Gpu, peaks_of

if TYPE_CHECKING:
    from foundry_fp8.run.settings import Run

__all__ = ["gpu_here", "keep", "latest", "warnings_for"]


def _kept() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "foundry_fp8" / "selftest.json"


def keep(found: Mapping[str, Any]) -> None:
    """Remember ``found``, what ``selftest.json`` holds, as the latest verdict of this machine."""
    write_file(_kept(), json.dumps(found) + "\n", "selftest")


def latest() -> dict[str, Any] | None:
    """The latest verdict of this machine, or ``None``."""
    try:
        found: dict[str, Any] = json.loads(_kept().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found.get("claims"), list) else None


def gpu_here(name: str) -> Gpu:
    """The one of :data:`GPUS` called ``name``, at what the latest self-test measured if that ran on one."""
    gpu, found = GPUS[name], latest() or {}
    rates = found.get("rates") or {}
    if peaks_of(str(rates.get("gpu"))) != gpu.peaks:
        return gpu
    reached = {key: value for key, value in rates.items() if key != "gpu"}
    measured = f"{', '.join(reached)} as measured by this machine's self-test on {found['date'][:10]}"
    return dataclasses.replace(gpu, reached=reached, measured=measured)


def warnings_for(run: Run) -> list[str]:
    """What the latest verdict refuted and a run uses, with what to do."""
    found = latest()
    if found is None:
        return []
    uses = {"algorithms.fp8": "converts"}  # the setting of a run, where it has not the algorithm's name
    return [
        f"{claim['claim']}: refuted on this machine on {found['date'][:10]} ({claim['figures']}). {claim['next']}"
        for claim in found["claims"]
        if claim["verdict"] == "refuted" and any(getattr(run, uses.get(key, key.removeprefix("algorithms.")), None) for key in claim.get("keys", ()))
    ]  # fmt: skip
