"""What Transformer Engine needs of a machine for each recipe, as rules over plain facts.

Source: TE 2.20 ``pytorch/quantization.py`` (``_compute_*_support``), ``common/gemm/cublaslt_gemm.cu``; before 2.9
``pytorch/fp8.py``. Versions are compared as tuples: TE reads ``torch.version.cuda`` as a float, where 12.10 is below 12.9.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import torch

from foundry_fp8.config.versions import dotted, release, unpacked
from foundry_fp8.layers.backend import Availability
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["Machine", "cublas_version", "form_reason", "machine_of", "requirement"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts that the rules read."""

    capability: tuple[int, int]
    """Compute capability of the GPU."""
    cuda: tuple[int, ...]
    """CUDA that torch was built with; empty for a build without."""
    cublas: tuple[int, ...]
    """cuBLASLt that is loaded; empty if unknown."""
    te: tuple[int, ...]
    """Transformer Engine."""


def machine_of(device: torch.device, te_version: str) -> Machine:
    """The facts of a CUDA device."""
    return Machine(
        capability=torch.cuda.get_device_capability(device),
        cuda=release(torch.version.cuda or ""),
        cublas=cublas_version() or (),
        te=release(te_version),
    )


_NO_FORM = {
    "constant": "Transformer Engine's recipes all measure an amax, and its linear has no factor for its GEMMs",
    "row": "Transformer Engine has no scales of rows",
}


def form_reason(recipe: Recipe) -> str | None:
    """Why Transformer Engine has no form of ``recipe`` on any machine, or ``None``."""
    if recipe.kind in ("tensor", "block", "mx", "nvfp4"):
        return None
    other = f"this backend gives Transformer Engine no form of {recipe.name}'s scales ({recipe.kind})"
    return _NO_FORM.get(recipe.kind, other)


def requirement(recipe: Recipe, machine: Machine) -> Availability:
    """Whether ``machine`` can run ``recipe`` through Transformer Engine; if not, why and what would."""
    major, minor = machine.capability
    gpu = f"the GPU has compute capability {major}.{minor}"
    if (reason := form_reason(recipe)) is not None:
        return Availability(False, reason, "Set backend: native, or emulated to check numerics.")
    if recipe.kind in ("mx", "nvfp4"):
        # TE takes nvfp4 on 12.x, which cannot round at random.
        if not (10, 0) <= machine.capability < (12, 0):
            return Availability(
                False,
                f"{gpu}, and Transformer Engine runs {recipe.name} on 10.x and 11.x alone",
                "Use a Blackwell data center GPU, or the current recipe (8.9 and later).",
            )
        if recipe.kind == "nvfp4" and machine.te < (2, 8):
            reason = f"Transformer Engine {dotted(machine.te)} has no nvfp4"
            return Availability(False, reason, "Install Transformer Engine 2.8 or later, or use mxfp8.")
        return _at_least(machine, cuda=(12, 8), cublas=(12, 8), what=recipe.name)
    if recipe.kind == "block":
        if machine.capability < (9, 0):
            return Availability(
                False,
                f"{gpu}, and block scaling needs 9.0 or later",
                "Use a Hopper GPU or later, or the current recipe (8.9 and later).",
            )
        if machine.capability >= (10, 0) and machine.te < (2, 9):
            return Availability(
                False,
                f"{gpu}, and Transformer Engine {dotted(machine.te)} runs block scaling on 9.0 alone",
                "Install Transformer Engine 2.9 or later, or use mxfp8.",
            )
        if machine.capability >= (12, 0):
            return Availability(
                False,
                f"{gpu}, and Transformer Engine's block scaling does not work on 12.x",
                "Use the current recipe.",
            )
        if machine.capability >= (10, 0) and not recipe.powers_of_two:
            return Availability(
                False,
                f"{gpu}, where block scaling is computed with E8M0 scales, and the recipe says power_2_scales: false",
                "Set recipe.block.power_2_scales: true, or use a Hopper GPU.",
            )
        return _at_least(machine, cuda=(12, 9), cublas=(12, 9), what="block scaling")
    if machine.capability < (8, 9):
        return Availability(
            False,
            f"{gpu}, and FP8 needs 8.9 or later",
            "Use an Ada, Hopper or Blackwell GPU, or check numerics with backend: emulated.",
        )
    if machine.capability < (9, 0):
        return _at_least(machine, cuda=(12, 1), cublas=(12, 1, 3), what="FP8 on compute capability 8.9")
    return Availability(True)


def _at_least(machine: Machine, *, cuda: tuple[int, ...], cublas: tuple[int, ...], what: str) -> Availability:
    remedy = (
        "On torch 2.7.0 (CUDA 12.6) only the delayed and current recipes run; torch 2.11 runs the others."
    )
    if machine.cuda < cuda:
        return Availability(
            False,
            f"torch was built with CUDA {dotted(machine.cuda) or 'none'}, and {what} needs {dotted(cuda)}",
            f"Install a torch built with CUDA {dotted(cuda)} or later (torch 2.8 and later offer one). {remedy}",
        )
    if machine.cublas and machine.cublas < cublas:
        return Availability(
            False,
            f"cuBLAS {dotted(machine.cublas)} is loaded, and {what} needs {dotted(cublas)}",
            f"Install a newer cuBLAS (it comes with a newer torch). {remedy}",
        )
    return Availability(True)


@functools.lru_cache(maxsize=1)
def cublas_version() -> tuple[int, ...] | None:
    """The version of the cuBLASLt library that torch loads, or ``None`` if there is none. Needs no GPU."""
    major = (torch.version.cuda or "").split(".")[0]
    if not major:
        return None
    try:
        number = ctypes.CDLL(f"libcublasLt.so.{major}").cublasLtGetVersion
    except (OSError, AttributeError):
        return None
    number.restype = ctypes.c_size_t
    return unpacked(int(number()))
