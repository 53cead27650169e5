"""What this machine and its installed stack can run: facts, and for every recipe and backend yes or the reason why not."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import torch

from foundry_fp8.backends import BACKENDS, choose_backend, load_backend
from foundry_fp8.backends.attention_requirements import AttentionShape, attention_requirement
from foundry_fp8.backends.emulated.gemm import has_bf16_units
from foundry_fp8.backends.native.attention import native_attention_requirement
from foundry_fp8.backends.transformer_engine.attention import attention_machine
from foundry_fp8.backends.transformer_engine.library import ImportProblem, installed_version, load_library
from foundry_fp8.backends.transformer_engine.requirements import cublas_version
from foundry_fp8.config.versions import dotted, installed, unpacked, untested
from foundry_fp8.kernels.launch import driver_version
from foundry_fp8.numerics.recipes import RECIPES

__all__ = ["collect"]

_PACKAGES = {
    "composer": "mosaicml",
    "llm-foundry": "llm-foundry",
    "streaming": "mosaicml-streaming",
    "transformers": "transformers",
    "triton": "triton",
}
_USUAL = AttentionShape(head_dim=128, sequence=4096)
_ATTENTION_CASES = (
    *((name, "head_dim 128, causal", _USUAL) for name in RECIPES),
    ("delayed", "head_dim 64, causal", dataclasses.replace(_USUAL, head_dim=64)),
    ("delayed", "a sequence that is no multiple of 128", dataclasses.replace(_USUAL, sequence=4000)),
    ("delayed", "sliding window", dataclasses.replace(_USUAL, window=True)),
    ("delayed", "packed documents", dataclasses.replace(_USUAL, documents=True)),
    ("delayed", "padded batch", dataclasses.replace(_USUAL, padding=True)),
    ("delayed", "bias (ALiBi, dense mask)", dataclasses.replace(_USUAL, bias=True)),
)
"""Recipe, what the doctor calls the case, and its shape."""


def collect() -> dict[str, Any]:
    """Look at this machine.

    Returns:
        Plain values, fit for JSON:

        * ``platform``: ``python``, ``machine``, whether the CPU has bf16 units, ``torch``, ``cuda`` (what torch was built with), ``driver`` (the CUDA
          version that the driver supports), ``cublas``, ``cudnn``, and the version of each package of the stack; ``None``
          for what is absent.
        * ``untested``: name of a package above -> what to say where its version is past those of the test runs.
        * ``devices``: one entry per kind of GPU (or one for the CPU): ``device``, ``name``, ``count``, ``capability``,
          ``memory_gib``.
        * ``transformer_engine``: ``version``, ``ok``, ``reason``, ``remedy``.
        * ``support``: one entry per device, recipe and backend: ``device``, ``recipe``, ``backend``, ``ok``, ``reason``,
          ``remedy``; for ``backend: auto`` also ``chosen``.
        * ``attention``: whether FP8 attention trains, one entry per device, recipe, ``backend`` (Transformer Engine's or native)
          and ``case`` (head size and mask): ``device``, ``recipe``, ``backend``, ``case``, ``ok``, ``reason``, ``remedy``.
    """
    devices, cudnn, library = _devices(), torch.backends.cudnn.version(), load_library()
    stack: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "bf16 units (CPU)": "yes" if has_bf16_units("cpu") else "no",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": dotted(driver_version() or ()) or None,
        "cublas": dotted(cublas_version() or ()) or None,
        "cudnn": cudnn and dotted(unpacked(cudnn)),
        **{name: installed(package) for name, package in _PACKAGES.items()},
    }
    packages = {"torch": "torch", **_PACKAGES}
    said = {key: untested(package, stack[key]) for key, package in packages.items() if stack[key]}
    return {
        "platform": stack,
        "untested": {key: text for key, text in said.items() if text},
        "devices": devices,
        "transformer_engine": {"version": installed_version(), "ok": False, **dataclasses.asdict(library)}
        if isinstance(library, ImportProblem)
        else {"version": library.version, "ok": True, "reason": "", "remedy": ""},
        "support": [entry for device in devices for entry in _support(device["device"])],
        "attention": [entry for device in devices for entry in _attention(torch.device(device["device"]))],
    }


def _devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        name = platform.processor() or platform.machine()
        return [{"device": "cpu", "name": name, "count": 1, "capability": None, "memory_gib": None}]
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        kind = kinds.setdefault(
            (properties.name, capability),
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "count": 0,
                "capability": capability,
                "memory_gib": round(properties.total_memory / 2**30, 1),
            },
        )
        kind["count"] += 1
    return list(kinds.values())


def _support(device_name: str) -> list[dict[str, Any]]:
    device = torch.device(device_name)
    entries: list[dict[str, Any]] = []
    for name, cls in RECIPES.items():
        recipe = cls()
        for backend in BACKENDS:
            found = load_backend(backend).availability(recipe, device)
            of = {"device": device_name, "recipe": name, "backend": backend}
            entries.append(of | dataclasses.asdict(found))
        entry = {"device": device_name, "recipe": name, "backend": "auto", "reason": "", "remedy": ""}
        try:
            chosen, _ = choose_backend("auto", recipe, device)
            entries.append({**entry, "ok": True, "chosen": chosen.name})
        except RuntimeError as error:
            entries.append({**entry, "ok": False, "reason": str(error)})
    return entries


def _attention(device: torch.device) -> list[dict[str, Any]]:
    entries = []
    for name, case, shape in _ATTENTION_CASES:
        recipe = RECIPES[name]()
        for backend in ("transformer_engine", "native"):
            found = load_backend(backend).availability(recipe, device)
            if found.ok and backend == "native":
                found = native_attention_requirement(recipe, shape)
            elif found.ok:
                found = attention_requirement(recipe, shape, attention_machine(device))
            of = {"device": str(device), "recipe": name, "backend": backend, "case": case}
            entries.append(of | dataclasses.asdict(found))
    return entries
