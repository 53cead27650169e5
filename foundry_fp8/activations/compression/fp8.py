"""Converted FP8 linears already keep their input in FP8: leave it alone, and keep it once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.activations.compression.saved import Compressor, StorageRef, Untouched
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.recipes import DelayedScaling

__all__ = ["FP8Saved"]


class FP8Saved(Compressor):
    """Leaves what FP8 linears save as it is, and shares it between linears that have the same input.

    Query, key and value projections of one input each quantise it. Recipes without state give the same bytes for the
    same tensor, so that one copy serves all. Delayed scaling has a scale for each linear; where the scale has been found
    equal (on a CPU, where looking costs nothing) the copies are shared too.

    A linear whose weight gradient stays in high precision, or that was demoted, saves a high-precision input: there the
    hooks around it go on packing.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self._source: list[tuple[Any, ...] | None] = []
        self._index = 0
        self._input: torch.UntypedStorage | None = None
        self._shared: dict[tuple[Any, ...], tuple[StorageRef, weakref.ref[Untouched]]] = {}

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        assert isinstance(module, FP8Linear)
        if not (module.runs_fp8 and module.wgrad == "fp8"):
            self._source.append(None)
            return
        x: Tensor = args[0] if args else kwargs["input"]
        recipe = module.recipe
        slot = module.slots["x"] if isinstance(recipe, DelayedScaling) and module.slots else None
        # On a CPU looking costs nothing; a fake tensor (a dry run) has nothing to look at.
        scale = None
        if slot is not None and slot.scale.device.type == "cpu" and type(slot.scale) is Tensor:
            scale = float(slot.scale)
        self._input = x.untyped_storage()
        key = (self._input._cdata, x.data_ptr(), tuple(x.shape), tuple(x.stride()), x._version, recipe, scale)
        self._source.append(() if slot is not None and scale is None else key)
        self._index = 0
        self._push()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._source.pop() is not None:
            self._regions.pop().__exit__(None, None, None)
        self._input = None
        self._shared = {key: entry for key, entry in self._shared.items() if entry[1]() is not None}

    def pack(self, x: Tensor) -> Untouched:
        """The pack hook."""
        kept = Untouched.of(x)
        source = self._source[-1] if self._source else None
        if not source or self._input is None or isinstance(x, nn.Parameter):
            return kept
        self._index += 1
        key = (*source, self._index, x.dtype, tuple(x.shape))
        entry = self._shared.get(key)
        if entry is not None and entry[0]() is self._input:
            shared = entry[1]()
            if shared is not None:
                return shared
        self._shared[key] = (weakref.ref(self._input), weakref.ref(kept))
        return kept
