"""How many bytes a piece of training holds: the CUDA allocator on a GPU, every live storage on anything else.

:class:`LiveBytes` counts each storage that an op returns from its birth to its death, wherever it is held, as
``torch.distributed._tools.MemTracker`` does, inside of wrapper tensors' own dispatch too (DTensors, weights kept in FP8); it needs no
module structure and keeps counting inside checkpoints and packed saves. What it does not see is memory that a kernel takes and gives
back inside itself. On the meta device it counts what would be allocated.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.compat.dispatch_mode import TorchDispatchMode
from foundry_fp8.compat.fake_tensor import FakeTensor, dry_run
from foundry_fp8.compat.pytree import tree_iter
from foundry_fp8.compat.storages import storage_number

__all__ = ["CudaBytes", "LiveBytes", "meter_for"]


class LiveBytes(TorchDispatchMode):
    """Live and peak bytes of the storages that ops made since it was entered.

    Attributes:
        live: Bytes alive now.
        peak: The largest ``live`` since the start or :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._dry = False
        self._known: dict[int, weakref.ref[Any]] = {}

    def __enter__(self) -> LiveBytes:
        """Count from now on."""
        self._dry = dry_run()
        super().__enter__()
        return self

    def reset_peak(self) -> None:
        """Let ``peak`` start again from ``live``."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and take its results into account."""
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # the wrapper's turn, whose ops come here
        if func.namespace == "prim":  # such as prim::device, which only asks
            return func(*args, **(kwargs or {}))
        before = {storage_number(x.untyped_storage()) for x in tree_iter((args, kwargs)) if _plain(x)}
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            # Outside of a dry run, fake ones are what a DTensor finds shapes by.
            if _plain(x) and isinstance(x, FakeTensor) is self._dry:
                storage = x.untyped_storage()
                # A view or in-place result shares what an argument brought, which is known or was there before.
                if storage_number(storage) not in before:
                    self._track(storage)
        self.peak = max(self.peak, self.live)
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage_number(storage), storage.nbytes()
        if key in self._known:
            return

        def freed(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self.live -= nbytes

        self._known[key] = weakref.ref(storage, freed)
        self.live += nbytes


def _plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided and not hasattr(x, "__tensor_flatten__")


class CudaBytes:
    """The same figures from the CUDA caching allocator (allocated, not reserved)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._start = 0

    @property
    def live(self) -> int:
        """Bytes allocated since it was entered."""
        return torch.cuda.memory_allocated(self.device) - self._start

    @property
    def peak(self) -> int:
        """The largest ``live`` since the start or :meth:`reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device) - self._start

    def reset_peak(self) -> None:
        """Let ``peak`` start again from ``live``."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def __enter__(self) -> CudaBytes:
        torch.cuda.synchronize(self.device)
        self._start = torch.cuda.memory_allocated(self.device)
        self.reset_peak()
        return self

    def __exit__(self, *exc: Any) -> None:
        torch.cuda.synchronize(self.device)


def meter_for(device: torch.device) -> CudaBytes | LiveBytes:
    """:class:`CudaBytes` on a GPU, :class:`LiveBytes` elsewhere."""
    return CudaBytes(device) if device.type == "cuda" else LiveBytes()
