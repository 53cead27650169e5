"""Linears that read one input quantise it once and keep it once.

Query, key and value projections, a gate and its up projection: each is given the same tensor. What a backend makes of it, it
notes here; the next linear that is given the same tensor takes that instead of making it again, and saves the same memory for
backward. The same means the same storage, seen in the same way, not written to since (:attr:`Tensor._version`), quantised in the
same way, in the same forward of the whole model or the same backward (a recompute), on the same stream. So results are those of
no sharing, bit for bit. Like autograd's own check of saved tensors it does not see a write that torch does not count (through
``.data``), between two linears that read one input.

Nothing is shared outside of a forward of the whole model and its backward, nor under selective checkpointing, whose recompute has
to run the operators that its first forward ran, nor in what ``torch.compile`` traces.

Delayed scaling has a scale of its own for each linear's input. Where it is found equal the bytes are equal too. Looking is free
on a CPU, where the emulated backend does; elsewhere it would wait for the device, so nothing is shared.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.compat.autograd import backward_number
from foundry_fp8.compat.selective_checkpoint import selective_checkpoint_runs
from foundry_fp8.compat.storages import storage_number

__all__ = ["QuantizedInput", "SharedInputs"]


_GONE = object()


class QuantizedInput:
    """What was made of one input, by name.

    Held while this is the input that was quantised last. After that what autograd keeps for backward is still found, for as long
    as it keeps it: the linears of a parallel block read their input before and after others read another one.
    """

    __slots__ = ("_held", "_seen")

    def __init__(self) -> None:
        self._held: dict[str, tuple[Any, ...]] = {}
        self._seen: dict[str, tuple[Any, ...]] = {}

    def get(self, name: str) -> tuple[Any, ...] | None:
        """What was put under ``name``, if it is still there."""
        if name in self._held:
            return self._held[name]
        if not self._seen:
            return None
        found = []
        for part in self._seen.get(name, (_GONE,)):
            found.append(part() if isinstance(part, _Seen) else part)
            if found[-1] is _GONE:
                return None
        return tuple(found)

    def put(self, name: str, *made: Any) -> None:
        """Note tensors and plain values under ``name``."""
        self._held[name] = made

    def release(self) -> None:
        """Hold nothing any more."""
        self._seen = {
            name: tuple(_Seen(part) if isinstance(part, Tensor) else part for part in made)
            for name, made in self._held.items()
        } | self._seen
        self._held = {}


class _Seen:
    """A tensor that somebody else keeps, maybe as another alias of its memory."""

    __slots__ = ("_dtype", "_place", "_storage")

    def __init__(self, x: Tensor) -> None:
        self._dtype, self._place = x.dtype, (x.storage_offset(), x.shape, x.stride())
        # A storage's Python object lives as long as the storage.
        self._storage = weakref.ref(x.untyped_storage())

    def __call__(self) -> Any:
        """An alias of it, or ``_GONE``."""
        storage = self._storage()
        if storage is None:
            return _GONE
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._place)


class SharedInputs:
    """The inputs of a backend's linears; see the module."""

    def __init__(self) -> None:
        self._inside = False
        self._forwards = 0
        self._entries: dict[tuple[Any, ...], tuple[weakref.ref[torch.UntypedStorage], QuantizedInput]] = {}
        self._latest: QuantizedInput | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedInputs, ()  # what is kept belongs to the graphs of one process

    def begin_forward(self) -> None:
        """A forward of the whole model begins."""
        self._forget()
        self._inside = True
        self._forwards += 1

    def end_forward(self) -> None:
        """A forward of the root ends: nothing is kept for the next one."""
        self._forget()
        self._inside = False

    def _forget(self) -> None:
        self._entries.clear()
        self._latest = None

    def of(self, x: Tensor, *how: Hashable) -> QuantizedInput:
        """What was made of ``x`` in the way ``how``: empty for an input that is new, or not shared.

        Args:
            x: The input as the linear was given it.
            how: All that the result depends on beside ``x``; ``None`` among it: not to be shared.
        """
        span = self._span(x)
        if span is None or None in how:
            return QuantizedInput()
        storage = x.untyped_storage()
        seen_as = (storage_number(storage), x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        key = (*seen_as, *span, *how)
        found = self._entries.get(key)
        if found is None or found[0]() is not storage:  # of another one at its address
            dropped = functools.partial(_drop, weakref.ref(self), key)
            found = self._entries[key] = weakref.ref(storage, dropped), QuantizedInput()
        if self._latest is not None and self._latest is not found[1]:
            self._latest.release()
        self._latest = found[1]
        return found[1]

    def _drop(self, key: tuple[Any, ...], storage: weakref.ref[torch.UntypedStorage]) -> None:
        """The input under ``key`` is gone, so nobody can read it any more."""
        found = self._entries.get(key)
        if found is not None and found[0] is storage:
            del self._entries[key]
            if found[1] is self._latest:
                self._latest = None

    def _span(self, x: Tensor) -> tuple[Hashable, ...] | None:
        """In what an input counts as the same; ``None`` where nothing is shared."""
        backward = backward_number()
        if (backward is None and not self._inside) or x.is_inference() or selective_checkpoint_runs():
            return None
        if not (x.is_cuda and torch.cuda.is_initialized()):
            return backward, self._forwards
        # What an eager forward made, a captured graph must not read: a replay would find other things there.
        captured = torch.cuda.is_current_stream_capturing()
        return backward, self._forwards, torch.cuda.current_stream(x.device).stream_id, captured


def _drop(
    inputs: weakref.ref[SharedInputs], key: tuple[Any, ...], storage: weakref.ref[torch.UntypedStorage]
) -> None:
    if (shared := inputs()) is not None:
        shared._drop(key, storage)
