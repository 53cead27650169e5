"""FP8 linears keep their input in FP8 already; those with the same input keep it once."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.activations.compression.saved import StorageRef
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.linear import FP8Linear, KeepInput
from foundry_fp8.numerics.recipes import DelayedScaling

__all__ = ["SharedInputs"]

_Source = tuple[torch.UntypedStorage, tuple[Any, ...]]


class SharedInputs:
    """Gives a linear, for what its backend made of its input, what an earlier linear keeps of the same input.

    Query, key and value projections of one input each quantise it. Recipes without state give the same bytes for the
    same tensor. Delayed scaling has a scale for each linear; where the scales are found equal (on a CPU, where looking
    costs nothing) the bytes are equal too.

    Which tensors hold the quantised input, only the backend knows: under FSDP and with cached weights the others that it
    saves, the weight among them, look the same from linear to linear.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[StorageRef, list[StorageRef]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedInputs, ()  # what is kept belongs to the graphs of one process

    def __call__(self, module: FP8Linear, x: Tensor) -> KeepInput | None:
        """See :attr:`FP8Linear.share_input`."""
        scale = None
        if module.slots is not None and isinstance(module.recipe, DelayedScaling):
            slot_scale = module.slots["x"].scale
            # A fake tensor (a dry run) has nothing to look at.
            if slot_scale.device.type != "cpu" or type(slot_scale) is not Tensor:
                return None
            scale = float(slot_scale)
        storage = x.untyped_storage()
        how = (module.recipe, scale, compute_dtype(x))
        key = (storage._cdata, x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x._version, *how)
        return functools.partial(self._keep, (storage, key))

    def _keep(self, source: _Source, quantized: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        storage, key = source
        key += tuple((t.dtype, t.storage_offset(), tuple(t.shape), t.stride()) for t in quantized)
        found = self._kept.get(key)
        if found is not None and found[0]() is storage:  # the same storage, not another one at its address
            kept = [ref() for ref in found[1]]
            if None not in kept:
                return tuple(_at(of, like) for of, like in zip(kept, quantized, strict=True))
        # Backward lets go of what it has read.
        self._kept = {k: (x, refs) for k, (x, refs) in self._kept.items() if refs[0]() is not None}
        self._kept[key] = weakref.ref(storage), [weakref.ref(t.untyped_storage()) for t in quantized]
        return quantized


def _at(storage: Any, like: Tensor) -> Tensor:
    """The tensor in ``storage`` that lies there as ``like`` does in its own."""
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())
