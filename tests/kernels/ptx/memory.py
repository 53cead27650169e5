"""Global and shared memory: every access inside a tensor, aligned as the hardware asks, and ordered by a barrier."""

import ctypes

import numpy as np
import torch

__all__ = ["UNSIGNED", "Global", "PTXError", "Shared"]

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class PTXError(AssertionError):
    """What the hardware would fault on, or leave undefined."""


class Global:
    """The tensors that a kernel was given. Addresses are the tensors' own."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.buffers: dict[int, np.ndarray] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
                self.buffers[storage.data_ptr()] = np.frombuffer(raw, np.uint8)

    def find(self, addresses, mask, size):
        """``(buffer of unsigned words of ``size`` bytes, indices, lanes)`` for each buffer that is touched."""
        if (addresses[mask] % size).any():
            raise PTXError(f"global access of {size} bytes at a misaligned address")
        left = mask.copy()
        for base, buffer in self.buffers.items():
            lanes = left & (addresses >= base) & (addresses + size <= base + len(buffer))
            if lanes.any():
                left &= ~lanes
                # A torch allocation begins at a multiple of 64 bytes here, but need not end at one of `size`.
                whole = buffer[: len(buffer) // size * size]
                yield whole.view(UNSIGNED.get(size, f"V{size}")), (addresses[lanes] - base) // size, lanes
        if left.any():
            thread = int(np.flatnonzero(left)[0])
            raise PTXError(f"thread {thread}: global access outside every tensor, {addresses[thread]:#x}")

    def load(self, addresses, mask, size):
        """``[threads, size]`` bytes, 0 where ``mask`` is false."""
        out = np.zeros((len(mask), size), np.uint8)
        for words, index, lanes in self.find(addresses, mask, size):
            out[lanes] = words[index].view(np.uint8).reshape(-1, size)
        return out

    def store(self, addresses, mask, data):
        """Write the rows of ``data``, bytes, where ``mask`` is true."""
        size = data.shape[1]
        for words, index, lanes in self.find(addresses, mask, size):
            words[index] = np.ascontiguousarray(data[lanes]).view(words.dtype)[:, 0]


class Shared:
    """A block's shared memory. Two warps that touch a byte, one of them writing, need a barrier between them."""

    BASE = 1024
    wavefronts = 0
    """Passes that the loads and stores of all blocks so far would take, bank conflicts included; whoever counts resets it."""

    def __init__(self, size: int, threads: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.warp = np.arange(threads, dtype=np.int16) // 32
        self.barrier()

    def barrier(self) -> None:
        """What came before is seen by all that follows."""
        self.writer = np.full(len(self.bytes), -1, np.int16)
        self.reader = np.full(len(self.bytes), -1, np.int16)

    def places(self, addresses, mask, size):
        """Indices ``[lanes, size]`` of the bytes, and the warps of the lanes."""
        start = addresses[mask] - self.BASE
        if (start % size).any():
            raise PTXError(f"shared access of {size} bytes at a misaligned address")
        if len(start) and (start.min() < 0 or start.max() + size > len(self.bytes)):
            raise PTXError(f"shared access outside of {len(self.bytes)} bytes")
        Shared.wavefronts += wavefronts(np.flatnonzero(mask), start, size)
        return start[:, None] + np.arange(size), self.warp[mask][:, None]

    def load(self, addresses, mask, size):
        """``[threads, size]`` bytes, 0 where ``mask`` is false."""
        places, warps = self.places(addresses, mask, size)
        writers = self.writer[places]
        if ((writers >= 0) & (writers != warps)).any():
            raise PTXError("shared memory is read by one warp after a write by another, without a barrier")
        readers = self.reader[places]
        self.reader[places] = np.where((readers == -1) | (readers == warps), warps, 999)
        out = np.zeros((len(mask), size), np.uint8)
        out[mask] = self.bytes[places]
        return out

    def store(self, addresses, mask, data):
        """Write the rows of ``data``, bytes, where ``mask`` is true."""
        places, warps = self.places(addresses, mask, data.shape[1])
        writers, readers = self.writer[places], self.reader[places]
        if ((readers >= 0) & (readers != warps)).any():
            raise PTXError("shared memory is written by one warp after a read by another, without a barrier")
        clash = (writers >= 0) & (writers != warps)
        if (clash & (self.bytes[places] != data[mask])).any():
            raise PTXError("shared memory is written by two warps without a barrier")
        self.writer[places] = np.broadcast_to(warps, places.shape)
        self.bytes[places] = data[mask]


BANKS, WORD = 32, 4


def wavefronts(threads, start, size):
    """Passes through the banks that accesses of ``size`` bytes at ``start`` take.

    A warp's 32 lanes go together for up to 4 bytes each, 16 of them for 8 bytes, 8 for 16. Different words of one bank take turns.
    Source: the CUDA C++ Best Practices Guide, shared memory and memory banks; wide accesses as Nsight Compute counts them.
    """
    together = threads // min(32, 32 * WORD // max(size, WORD))
    words = (start // WORD)[:, None] + np.arange(max(1, size // WORD))
    group = np.broadcast_to(together[:, None], words.shape)
    distinct = np.unique(np.stack([group.ravel(), words.ravel()]), axis=1)
    turns = np.zeros((together.max(initial=-1) + 1, BANKS), np.int64)
    np.add.at(turns, (distinct[0], distinct[1] % BANKS), 1)
    return int(turns.max(axis=1, initial=0).sum())
