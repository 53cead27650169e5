"""Registers, numbers and addresses: what the operands of an instruction mean, for all threads at once."""

import re

import numpy as np

from tests.kernels.ptx.memory import Shared
from tests.kernels.ptx.numbers import TYPES, from_words, to_words
from tests.kernels.ptx.program import Program

__all__ = ["Operands"]

ADDRESS = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]")


class Operands:
    """The registers of a block's threads, and how they are read and written.

    Args:
        program: The kernel.
        index: The block's coordinates in the grid.
        grid: The grid's size.
    """

    def __init__(self, program: Program, index, grid) -> None:
        self.program = program
        self.threads = np.arange(program.threads)
        self.registers: dict[str, np.ndarray] = {}
        self.special = {"%tid.x": self.threads, "%laneid": self.threads % 32, "%ntid.x": program.threads}
        for axis, place, size in zip("xyz", index, grid, strict=True):
            self.special |= {f"%ctaid.{axis}": place, f"%nctaid.{axis}": size}

    def words(self, operand: str, kind: str):
        """The register, special register or number ``operand``, as unsigned words wide enough for ``kind``."""
        if operand in self.registers:
            return self.registers[operand]
        if operand in self.special:
            return np.broadcast_to(np.asarray(self.special[operand]), self.threads.shape).astype(np.uint32)
        if operand.startswith(
            "%"
        ):  # never written: for parts of vectors that nothing uses. So what it holds must not matter
            return to_words(np.full(self.threads.shape, 0xA5A5A5A5A5A5A5A5, np.uint64), self.bits_of(operand))
        if operand.startswith(("0f", "0d")):
            value = int(operand[2:], 16)
        elif operand == "global_smem":
            value = Shared.BASE
        else:
            value = int(operand.rstrip("U"), 0)
        if kind == "pred":
            return np.full(self.threads.shape, value != 0)
        size = 4 if kind.endswith("x2") else TYPES[kind].itemsize
        return np.full(self.threads.shape, value & (256**size - 1), f"u{max(size, 2)}")

    def read(self, operand: str, kind: str):
        """The values of an operand as ``kind``; of a vector ``{a, b}`` its parts joined, the first lowest."""
        if operand.startswith("{"):
            parts = operand.strip("{} ").split(",")
            each = 8 * TYPES[kind].itemsize // len(parts)
            joined = sum(
                from_words(self.words(part.strip(), f"b{each}"), f"b{each}").astype(np.uint64)
                << np.uint64(i * each)
                for i, part in enumerate(parts)
            )
            return from_words(joined, kind)
        return from_words(self.words(operand, kind), kind)

    def bits_of(self, register: str) -> int:
        """The width that a register was declared with."""
        return self.program.register_bits[register.rstrip("0123456789")]

    def write(self, operand: str, values, mask) -> None:
        """Set a register where ``mask`` is true."""
        if operand == "_":
            return
        words = to_words(values, self.bits_of(operand))
        if not mask.all():
            before = self.registers.get(operand)
            words = np.where(mask, words, 0 if before is None else before).astype(words.dtype)
        self.registers[operand] = words

    def write_parts(self, operand: str, values, kind: str, mask) -> None:
        """Set the registers of ``{a, b}``, the first to the lowest bits of ``values``."""
        parts = operand.strip("{} ").split(",")
        each = 8 * TYPES[kind].itemsize // len(parts)
        words = to_words(values, 8 * TYPES[kind].itemsize)
        for i, part in enumerate(parts):
            self.write(part.strip(), from_words((words >> words.dtype.type(i * each)), f"b{each}"), mask)

    def address(self, operand: str):
        """Addresses of ``[base + offset]``, int64."""
        base, offset = ADDRESS.match(operand).groups()
        words = self.words(base, "b64" if base.startswith("%rd") else "b32")
        return words.astype(np.int64) + int(offset or "0", 0)
