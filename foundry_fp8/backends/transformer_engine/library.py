"""The installed Transformer Engine: imported once, with every way that the import fails explained.

Transformer Engine fails to import in many ways that are no ImportError: with no driver its Triton kernels raise
RuntimeError, a missing extension raises StopIteration (1.13) or FileNotFoundError (2.8), a missing CUDA library
CalledProcessError or OSError. All of them end here as one sentence and a remedy.

Source: ``NVIDIA/TransformerEngine`` tags v2.4 to v2.20, ``transformer_engine/pytorch/{fp8,quantization}.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import warnings
from contextlib import AbstractContextManager
from typing import Any

from foundry_fp8.config.versions import installed, release

__all__ = ["MINIMUM_VERSION", "ImportProblem", "Library", "installed_version", "library", "load_library"]

MINIMUM_VERSION = (2, 4)
"""The first release with the three Hopper recipes whose extension builds without nvcc."""

_INSTALL = (
    'Install it for this torch: pip install --no-build-isolation "transformer-engine[pytorch]>=2.4,<2.20" for torch 2.7, '
    '"transformer-engine[pytorch]" for a later one (built against 2.11; compiles a C++ extension; no nvcc needed).'
)


@dataclasses.dataclass(frozen=True)
class ImportProblem:
    """Why Transformer Engine cannot be used here, and what would make it usable."""

    reason: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Library:
    """Transformer Engine's modules, and its two spellings made one.

    Attributes:
        te: ``transformer_engine.pytorch``.
        recipe: ``transformer_engine.common.recipe``.
        quantization: ``transformer_engine.pytorch.quantization`` (2.9 and later) or ``.fp8``.
        version: As installed.
    """

    te: Any
    recipe: Any
    quantization: Any
    version: str

    def autocast(self, recipe: Any, *, enabled: bool = True) -> AbstractContextManager[Any]:
        """TE's autocast. ``recipe`` is TE's own; its amax reduction stays unused (see :mod:`.delayed`)."""
        if hasattr(self.te, "autocast"):
            context: AbstractContextManager[Any] = self.te.autocast(enabled=enabled, recipe=recipe)
        else:
            context = self.te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)
        return context

    def is_running(self, recipe: Any) -> bool:
        """Whether an autocast of this very recipe object is entered now."""
        state = self.quantization.FP8GlobalStateManager
        return bool(state.is_fp8_enabled()) and state.get_fp8_recipe() is recipe

    def refusal(self, recipe_name: str) -> str | None:
        """TE's own reason why a recipe cannot run on the current GPU, or ``None``."""
        check = {
            "delayed": "check_fp8_support",
            "current": "check_fp8_support",
            "block": "check_fp8_block_scaling_support",
            "mxfp8": "check_mxfp8_support",
            "nvfp4": "check_nvfp4_support",
        }[recipe_name]
        ok, reason = getattr(self.quantization, check)()
        return None if ok else (reason or "Transformer Engine gives no reason")


def installed_version() -> str | None:
    """The version that pip reports, without importing it; ``None`` if it is not installed."""
    return installed("transformer-engine") or installed("transformer-engine-torch")


@functools.lru_cache(maxsize=1)
def load_library() -> Library | ImportProblem:
    """Import Transformer Engine once; never raises."""
    try:
        return _import_library()
    except Exception as error:
        return explain(error)


def library() -> Library:
    """Transformer Engine.

    Raises:
        RuntimeError: It cannot be imported, with the reason and the remedy.
    """
    found = load_library()
    if isinstance(found, ImportProblem):
        raise RuntimeError(f"{found.reason}. {found.remedy}")
    return found


def _import_library() -> Library | ImportProblem:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an absent extension warns before it raises; the raise says more
        te = importlib.import_module("transformer_engine.pytorch")
    version = installed_version() or str(
        getattr(importlib.import_module("transformer_engine"), "__version__", "")
    )
    if release(version) < MINIMUM_VERSION:
        return ImportProblem(
            f"Transformer Engine {version or 'of unknown version'} is too old",
            f"This backend needs 2.4 or later. {_INSTALL}",
        )
    recipe = importlib.import_module("transformer_engine.common.recipe")
    try:
        quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    except ModuleNotFoundError:  # before 2.9
        quantization = importlib.import_module("transformer_engine.pytorch.fp8")
    return Library(te=te, recipe=recipe, quantization=quantization, version=version)


def explain(error: BaseException) -> ImportProblem:
    """Say what an exception of TE's import means."""
    text = f"{type(error).__name__}: {error}".strip().rstrip(":").splitlines()[0][:200]
    version = installed_version()
    if version is None:
        return ImportProblem("Transformer Engine is not installed", _INSTALL)
    said = f"Transformer Engine {version} is installed but its import fails ({text})"
    if release(version) < MINIMUM_VERSION:
        return ImportProblem(f"{said}, and it is too old", f"This backend needs 2.4 or later. {_INSTALL}")
    if "active drivers" in str(error) or "no NVIDIA driver" in str(error):
        return ImportProblem(said, "It cannot be imported without an NVIDIA driver: run on a GPU machine.")
    if isinstance(error, StopIteration | FileNotFoundError) or "transformer_engine_torch" in str(error):
        return ImportProblem(said, f"Its PyTorch extension is missing or of another version. {_INSTALL}")
    if isinstance(error, ImportError) and "undefined symbol" in str(error):
        return ImportProblem(said, f"Its extension was built for another torch. {_INSTALL}")
    if "cudnn" in str(error).lower():
        return ImportProblem(
            said,
            "cuDNN is missing or too old for this release: 2.20.2 needs cuDNN 9.12, torch 2.7.0 brings 9.5; "
            "Transformer Engine 2.4 to 2.19 work with it.",
        )
    if any(name in str(error).lower() for name in ("nvrtc", "cudart", "cublas", "curand", "shared object")):
        return ImportProblem(
            said,
            "A CUDA library was not found. Install the CUDA toolkit that matches torch.version.cuda, or put its libraries "
            "on LD_LIBRARY_PATH.",
        )
    return ImportProblem(said, f"Reinstall it against this torch. {_INSTALL}")
