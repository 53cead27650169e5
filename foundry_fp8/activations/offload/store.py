"""Tensors saved for backward, kept in host memory from one unit's forward to shortly before its backward.

A unit is one call of a module. Its copies out begin as it saves, beside its own forward, and its device memory is let go when the next
unit begins: only there does the computation wait for them. When a unit's backward first reads, the copies back of the unit before it
begin, beside that backward. The last unit never leaves the device: its backward comes first.

What goes wrong in such a scheme, and what is done about it here (each line has a test):

- *Device memory that is freed* while a copy still reads or writes it is given to the next operation. The store holds it until the
  computation has been made to wait for the copy. (``record_stream`` would do, but delays the reuse by an amount that depends on how far
  the host runs ahead.)
- *A storage saved twice*, or through several views, is copied once, whole, and all views are cut from one copy. One that a later unit saves too (an
  encoder's output, a mask) stays on the device: it is alive there anyway. An address proves nothing, as freed memory is reused;
  the storage must still be alive.
- *Writing in place* after a tensor was saved races with its copy, and hooks switch off torch's check: reading it back is an error.
- *Parameters*, their views and casts, *subclasses*, *small tensors* and *small parts of large storages* stay.
- *A graph that is dropped* without a backward, an exception for example, gives its buffers back as its handles die.
- *Buffers of many sizes* (batches of varying length) would pin ever more memory: a larger one serves for a smaller, and one that is too small
  is replaced.

Sources of the traps: torchtune's ``OffloadActivations`` (its stashes, ``min_offload_size``), TRL's copy of it (pull requests 5700 and 6241: what a
forgotten stash leaks, stale storage keys), and the pinned memory of torch's ``CachingHostAllocator``.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from foundry_fp8.activations.compression.saved import StorageRef, UnpackedTensor, is_parameter
from foundry_fp8.compat.fake_tensor import FakeTensor
from foundry_fp8.compat.storages import storage_number
from foundry_fp8.layers.produced import in_memory

__all__ = ["MIN_BYTES", "CopyQueue", "CudaCopyQueue", "HostStore", "host_store", "moves"]

MIN_BYTES = 1024
"""Smaller storages stay, as in torchtune's ``OffloadActivations``."""


def moves(x: Tensor) -> bool:
    """Whether a store takes ``x``."""
    return (
        type(x) in (Tensor, FakeTensor)
        and x.layout == torch.strided
        and not x.is_conj()
        and not x.is_neg()
        and MIN_BYTES <= x.untyped_storage().nbytes() <= 4 * x.numel() * x.element_size()
        and not is_parameter(x)
    )


class CopyQueue:
    """What a store asks of a device; here copies that are over when they return.

    A queue makes its copies in the order in which it was asked. So a host buffer may be given out again while copies from or to it are
    still under way: whatever is done to it next is queued behind them.
    """

    def buffer(self, nbytes: int) -> Tensor:
        """A host buffer of ``nbytes`` bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy when the computation has come to this point, and go on.

        Returns:
            The event of its end. Until the computation waits for it, the caller holds both tensors.
        """
        target.copy_(source)

    def wait(self, event: Any) -> None:
        """What the computation is given from here on runs after ``event``; the host does not wait."""


class CudaCopyQueue(CopyQueue):
    """Copies on a stream of their own, from and to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        """Pinned memory, of which torch takes the next power of two (``CachingHostAllocator``)."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Queue the copy behind what the current stream was given so far: the making of ``source``, the last use of ``target``."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait."""
        torch.cuda.current_stream(self.device).wait_event(event)


@dataclasses.dataclass(eq=False, slots=True)
class _Copy:
    """One copy, and the device memory that it reads or writes, until the computation has been made to wait for it."""

    event: Any
    memory: Tensor | None


class _Unit:
    """What one call of a module saved.

    Attributes:
        kept: Its storages, as long as backward may ask for them.
        before: The unit that came before it, as long as it has any.
    """

    def __init__(self, before: _Unit | None) -> None:
        self.kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self.before = None if before is None else weakref.ref(before)

    def fetch(self) -> None:
        """Begin to be on the device, as far as backward still asks for it."""
        for kept in list(self.kept):
            if kept.unread > 0:
                kept.fetch()


class _Kept:
    """One storage.

    Attributes:
        host: Its bytes, once the copy out is over.
        memory: The same on the device; ``None`` while they are in host memory alone.
        copy: The latest one, out or back.
        source: What was saved, as long as ``memory`` is its own.
        stays: Whether it is on the device until backward is over.
        unread: Handles that have not been read back.
    """

    def __init__(self, store: HostStore, unit: _Unit, x: Tensor) -> None:
        self.store, self.unit, self.device = store, unit, x.device
        self.storage: StorageRef = weakref.ref(x.untyped_storage())
        self.version = x._version
        self.source: UnpackedTensor | None = UnpackedTensor.of(x)
        self.memory: Tensor | None = _bytes_of(x)
        self.nbytes = self.memory.numel()
        self.stays = False
        self.unread = 0
        self.host = store.take(self.nbytes)
        weakref.finalize(self, store.give, self.host).atexit = False
        self.copy = store.start(self.host[: self.nbytes], self.memory, self.memory)
        unit.kept.add(self)

    def stay(self, x: Tensor) -> None:
        """``x`` is what was saved, and is held by others beside."""
        self.source, self.memory, self.stays = UnpackedTensor.of(x), _bytes_of(x), True

    def leave(self) -> None:
        """Be in host memory alone."""
        if not self.stays:
            self.memory = None
            if self.source is not None and not self.source.written_to:  # if it was, reading it back says so
                self.source = None

    def fetch(self) -> None:
        """Begin to be on the device."""
        if self.memory is None:
            self.memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            self.copy = self.store.start(self.memory, self.host[: self.nbytes], self.memory)


@dataclasses.dataclass(eq=False, slots=True)
class _Handle:
    """What autograd holds in place of a tensor. Its unit need not be the one that saved the storage first."""

    kept: _Kept
    unit: _Unit
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class HostStore:
    """Host memory for what one device saves for backward.

    Args:
        queue: Makes the copies.
        device: Whose tensors it takes; those of another, a table in host memory for example, stay.

    Attributes:
        moved: Bytes copied out so far.
        held: Bytes of host buffers, in use and free.
    """

    def __init__(self, queue: CopyQueue, device: torch.device) -> None:
        self.queue, self.device = queue, device
        self.moved = 0
        self.held = 0
        self._free: list[Tensor] = []
        self._returned: collections.deque[Tensor] = collections.deque()
        self._flying: collections.deque[_Copy] = collections.deque()  # in the queue's order
        self._last: weakref.ref[_Unit] | None = None
        self._known: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def unit(self) -> Iterator[None]:
        """What autograd saves within goes to host memory, as one unit."""
        unit: _Unit | None = None

        def pack(x: Tensor) -> _Handle | UnpackedTensor:
            nonlocal unit
            x = in_memory(x)
            # A dry run's have no bytes to keep.
            if type(x) is not Tensor or x.device != self.device or not moves(x):
                return UnpackedTensor.of(x)
            if unit is None:  # not one that saves nothing, as in evaluation
                unit = self._begin()
            return self._handle(unit, x)

        with saved_tensors_hooks(pack, self._unpack):
            yield

    def take(self, nbytes: int) -> Tensor:
        """A host buffer of at least so many bytes, in place of one that is too small where none is large enough."""
        free = self.free
        place = bisect.bisect_left(free, nbytes, key=Tensor.numel)
        if place < len(free):
            return free.pop(place)
        if free:
            self.held -= free.pop().numel()
        self.held += nbytes
        return self.queue.buffer(nbytes)

    def give(self, host: Tensor) -> None:
        """Take a buffer back, whatever copies of it are under way: the queue makes them in order."""
        self._returned.append(host)  # and no more: handles die at any moment, and on any thread

    @property
    def free(self) -> list[Tensor]:
        """The host buffers that nothing uses, rising in size."""
        while self._returned:
            bisect.insort(self._free, self._returned.popleft(), key=Tensor.numel)
        return self._free

    def start(self, target: Tensor, source: Tensor, memory: Tensor) -> _Copy:
        """Begin a copy. ``memory`` is the one of the two that is on the device."""
        copy = _Copy(self.queue.copy(target, source), memory)
        self._flying.append(copy)
        return copy

    def _wait(self, copy: _Copy) -> None:
        """Let the computation wait for a copy, and with it for those before, and let go of their device memory."""
        if copy.memory is None:
            return
        self.queue.wait(copy.event)
        while copy.memory is not None:
            self._flying.popleft().memory = None

    def _begin(self) -> _Unit:
        """A new unit. What the last one saved leaves the device."""
        if self._flying:
            self._wait(self._flying[-1])
        last = None if self._last is None else self._last()
        if last is not None:
            for kept in list(last.kept):
                kept.leave()
        unit = _Unit(last)
        self._last = weakref.ref(unit)
        return unit

    def _handle(self, unit: _Unit, x: Tensor) -> _Handle:
        storage = x.untyped_storage()
        kept = self._known.get(storage_number(storage))
        if kept is None or kept.storage() is not storage or kept.version != x._version:
            kept = self._known[storage_number(storage)] = _Kept(self, unit, x)
            self.moved += kept.nbytes
        elif kept.unit is not unit:
            kept.stay(x)
        kept.unread += 1
        return _Handle(kept, unit, x.dtype, x.size(), x.stride(), x.storage_offset())

    def _unpack(self, saved: _Handle | UnpackedTensor) -> Tensor:
        if isinstance(saved, UnpackedTensor):
            return saved.tensor()
        kept = saved.kept
        before = None if saved.unit.before is None else saved.unit.before()
        kept.fetch()
        saved.unit.fetch()
        self._wait(kept.copy)
        if before is not None:
            before.fetch()
        if kept.source is not None:
            kept.source.tensor()  # which says so if it was written to
        assert kept.memory is not None
        x = torch.empty(0, dtype=saved.dtype, device=kept.device)
        x.set_(kept.memory.untyped_storage(), saved.offset, saved.size, saved.stride)
        kept.unread -= 1
        if kept.unread <= 0:  # again and again where the graph is retained
            kept.leave()
        return x


def _bytes_of(x: Tensor) -> Tensor:
    """The storage of ``x``, whole."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


@functools.cache
def host_store(device: torch.device) -> HostStore:
    """The store of ``device``: one a process, so that all models on it share its buffers."""
    return HostStore(CudaCopyQueue(device) if device.type == "cuda" else CopyQueue(), device)
