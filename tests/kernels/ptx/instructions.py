"""What each instruction does, to all threads of a mask at once; from NVIDIA's "Parallel Thread Execution ISA"."""

import re

import numpy as np

from tests.kernels.ptx.memory import Global, PTXError, Shared
from tests.kernels.ptx.numbers import BINARY, COMPARE, TYPES, UNARY, convert, flushed, fma, from_words
from tests.kernels.ptx.operands import Operands
from tests.kernels.ptx.program import Instruction, Program
from tests.kernels.ptx.tensor_cores import wgmma

__all__ = ["Instructions"]

NOTHING_TO_DO = {"fence", "membar", "nop", "prefetch", "griddepcontrol"}


class Instructions(Operands):
    """Everything but control flow.

    Args:
        program: The kernel.
        arguments: Its parameters: addresses, integers and floats, as words.
        memory: The tensors.
        shared_bytes: Dynamic shared memory.
        index: The block's coordinates in the grid.
        grid: The grid's size.
    """

    def __init__(
        self, program: Program, arguments: list[int], memory: Global, shared_bytes: int, index, grid
    ) -> None:
        super().__init__(program, index, grid)
        self.arguments, self.memory = arguments, memory
        self.shared = Shared(shared_bytes, program.threads)
        self.copies: list[list] = [[]]

    def execute(self, instruction: Instruction, mask) -> None:
        """Run one instruction for the threads of ``mask``."""
        handler = getattr(self, f"_{instruction.op}", None)
        if handler is not None:
            handler(instruction, instruction.operands, mask)
        elif instruction.op in BINARY or instruction.op in UNARY:
            self._arithmetic(instruction, instruction.operands, mask)
        elif instruction.op not in NOTHING_TO_DO:
            raise PTXError("this instruction is not known here")

    def _arithmetic(self, i: Instruction, o, mask) -> None:
        kind = i.suffixes[-1]
        values = [self.read(operand, kind) for operand in o[1:]]
        if "ftz" in i.suffixes:
            values = [flushed(value) for value in values]
        if "wide" in i.suffixes:
            values = [value.astype(f"{value.dtype.kind}{2 * value.dtype.itemsize}") for value in values]
        if i.suffixes[0] == "hi":
            product = [int(a) * int(b) >> 8 * values[0].dtype.itemsize for a, b in zip(*values, strict=True)]
            result = np.array(product, dtype=object).astype(values[0].dtype)
        elif i.op in UNARY:
            result = UNARY[i.op](values[0])
        elif "xorsign" in i.suffixes:
            a, b = values
            size = BINARY[i.op](np.abs(a), np.abs(b))
            result = np.where(np.signbit(a) ^ np.signbit(b), -size, size)
        else:
            result = BINARY[i.op](*values)
        if "NaN" in i.suffixes:
            result = np.where((values[0] != values[0]) | (values[1] != values[1]), np.float32(np.nan), result)
        if "ftz" in i.suffixes:
            result = flushed(result)
        if kind not in ("pred",) and "wide" not in i.suffixes and not kind.endswith("x2"):
            result = result.astype(TYPES[kind])
        self.write(o[0], result, mask)

    def _fma(self, i, o, mask) -> None:
        kind = i.suffixes[-1]
        a, b, c = (self.read(operand, kind) for operand in o[1:])
        if kind == "f32":
            result = fma(*map(flushed, (a, b, c))) if "ftz" in i.suffixes else fma(a, b, c)
        else:
            result = (a.astype(np.float64) * b + c).astype(a.dtype)
        self.write(o[0], result, mask)

    def _mad(self, i, o, mask) -> None:
        a, b = (self.read(operand, i.suffixes[-1]) for operand in o[1:3])
        if "wide" in i.suffixes:
            wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
            self.write(o[0], a.astype(wide) * b + self.read(o[3], f"b{8 * wide.itemsize}").view(wide), mask)
        else:
            self.write(o[0], a * b + self.read(o[3], i.suffixes[-1]), mask)

    def _shl(self, i, o, mask) -> None:
        value, by = self.read(o[1], i.suffixes[-1]), self.read(o[2], "u32")
        bits = 8 * value.dtype.itemsize
        shifted = value << np.minimum(by, bits - 1).astype(value.dtype)
        self.write(o[0], np.where(by >= bits, 0, shifted).astype(value.dtype), mask)

    def _shr(self, i, o, mask) -> None:
        value, by = self.read(o[1], i.suffixes[-1]), self.read(o[2], "u32")
        bits = 8 * value.dtype.itemsize
        shifted = value >> np.minimum(by, bits - 1).astype(value.dtype)
        past = shifted if value.dtype.kind == "i" else 0
        self.write(o[0], np.where(by >= bits, past, shifted).astype(value.dtype), mask)

    def _bfe(self, i, o, mask) -> None:
        value = self.read(o[1], i.suffixes[-1])
        start, length = (self.read(operand, "u32").astype(np.int64) & 255 for operand in o[2:])
        field = (value.astype(np.int64) >> start) & ((1 << length) - 1)
        if value.dtype.kind == "i":
            field = np.where(
                (length > 0) & (field >> np.maximum(length - 1, 0) & 1 == 1), field - (1 << length), field
            )
        self.write(o[0], field.astype(value.dtype), mask)

    def _prmt(self, i, o, mask) -> None:
        low, high, select = (self.read(operand, "b32").astype(np.uint64) for operand in o[1:])
        both = low | (high << np.uint64(32))
        result = np.zeros(self.threads.shape, np.uint64)
        for byte in range(4):
            chosen = (select >> np.uint64(4 * byte)) & np.uint64(15)
            value = (both >> ((chosen & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(value >> np.uint64(7) == 1, 255, 0).astype(np.uint64)
            result |= np.where(chosen & np.uint64(8), sign, value) << np.uint64(8 * byte)
        self.write(o[0], result.astype(np.uint32), mask)

    def _lop3(self, i, o, mask) -> None:
        a, b, c = (self.read(operand, "b32") for operand in o[1:4])
        table, result = int(o[4].rstrip("U"), 0), np.zeros(self.threads.shape, np.uint32)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        self.write(o[0], result, mask)

    def _setp(self, i, o, mask) -> None:
        kind = i.suffixes[-1]
        if "ftz" in i.suffixes:
            result = COMPARE[i.suffixes[0]](*(flushed(self.read(operand, kind)) for operand in o[1:3]))
        else:
            result = COMPARE[i.suffixes[0]](self.read(o[1], kind), self.read(o[2], kind))
        for place, name in enumerate(o[0].split("|")):
            self.write(name.strip(), result[:, place] if result.ndim == 2 else result, mask)

    def _selp(self, i, o, mask) -> None:
        a, b = (self.read(operand, i.suffixes[-1]) for operand in o[1:3])
        self.write(o[0], np.where(self.read(o[3], "pred"), a, b).astype(a.dtype), mask)

    def _mov(self, i, o, mask) -> None:
        kind = i.suffixes[-1]
        value = self.read(o[1], kind)
        if o[0].startswith("{"):
            self.write_parts(o[0], value, kind, mask)
        else:
            self.write(o[0], value, mask)

    def _cvt(self, i, o, mask) -> None:
        values = [
            self.read(operand, "b16" if i.suffixes[-1].startswith("e") else i.suffixes[-1])
            for operand in o[1:]
        ]
        self.write(o[0], convert(i.suffixes, values), mask)

    def _cvta(self, i, o, mask) -> None:
        self.write(o[0], self.read(o[1], "u64"), mask)

    def _elect(self, i, o, mask) -> None:
        self.write(o[0].split("|")[1], mask & (self.threads % 32 == 0), mask)

    def _bar(self, i, o, mask) -> None:
        """bar.warp.sync: threads run in step here."""

    def _shfl(self, i, o, mask) -> None:
        value, by, limits = (self.read(operand, "b32").astype(np.int64) for operand in o[1:4])
        lane, segment = self.threads & 31, limits >> 8 & 31
        first, last = lane & segment, lane & segment | limits & 31 & ~segment
        wanted = {
            "bfly": lambda: lane ^ by & 31,
            "idx": lambda: first | by & 31 & ~segment,
            "down": lambda: lane + (by & 31),
            "up": lambda: lane - (by & 31),
        }[i.suffixes[1]]()
        inside = wanted >= last if i.suffixes[1] == "up" else wanted <= last
        source = (self.threads & ~31) + np.where(inside, wanted, lane)
        if not mask[source[mask]].all():
            raise PTXError("a shuffle reads a thread that does not take part")
        self.write(o[0].split("|")[0], value[source].astype(np.uint32), mask)

    def _redux(self, i, o, mask) -> None:
        if not mask.all():
            raise PTXError("a reduction in which not every thread takes part")
        value = self.read(o[1], i.suffixes[-1]).reshape(-1, 32)
        result = value[:, 0]
        for lane in range(1, 32):
            result = BINARY[i.suffixes[1]](result, value[:, lane])
        self.write(o[0], np.repeat(result, 32), mask)

    # Memory.

    def _ld(self, i, o, mask) -> None:
        if "param" in i.suffixes:
            number = int(re.search(r"_param_(\d+)", o[1])[1])
            value = np.full(self.threads.shape, self.arguments[number], np.uint64)
            self.write(o[0], from_words(value, i.suffixes[-1]), mask)
            return
        names = [name.strip() for name in o[0].strip("{} ").split(",")]
        size = TYPES[i.suffixes[-1]].itemsize
        space = self.shared if "shared" in i.suffixes else self.memory
        data = space.load(self.address(o[1]), mask, size * len(names))
        for place, name in enumerate(names):
            part = np.ascontiguousarray(data[:, place * size : (place + 1) * size])
            self.write(name, part.view(TYPES[i.suffixes[-1]])[:, 0], mask)

    def _st(self, i, o, mask) -> None:
        parts = [self.read(name.strip(), i.suffixes[-1]) for name in o[1].strip("{} ").split(",")]
        data = np.concatenate(
            [np.ascontiguousarray(part).view(np.uint8).reshape(len(mask), -1) for part in parts], 1
        )
        (self.shared if "shared" in i.suffixes else self.memory).store(self.address(o[0]), mask, data)

    def _atom(self, i, o, mask) -> None:
        address, kind = self.address(o[1]), i.suffixes[-1]
        operation = BINARY[next(s for s in i.suffixes if s in BINARY)]
        value, size = self.read(o[2], kind), TYPES[kind].itemsize
        before = np.zeros_like(value)
        for thread in np.flatnonzero(mask):
            only = self.threads == thread
            before[thread] = self.memory.load(address, only, size).view(TYPES[kind])[thread, 0]
            result = operation(before, value).astype(TYPES[kind])
            self.memory.store(address, only, result.view(np.uint8).reshape(-1, size))
        self.write(o[0], before, mask)

    def _red(self, i, o, mask) -> None:
        self._atom(i, ("_", *o), mask)

    def _cp(self, i, o, mask) -> None:
        if "commit_group" in i.suffixes:
            self.copies.append([])
        elif "wait_group" in i.suffixes or "wait_all" in i.suffixes:
            keep = int(o[0], 0) if o else 0
            done = self.copies[: len(self.copies) - 1 - keep]
            self.copies = self.copies[len(done) :]
            for copy in (copy for group in done for copy in group):
                self.shared.store(*copy)
        else:  # cp.async: arrives at the wait, so that a read before it is noticed
            size = int(o[2], 0)
            wanted = self.read(o[3], "u32").astype(np.int64) if len(o) > 3 else np.full(len(mask), size)
            if not np.isin(wanted[mask], (0, size)).all():
                raise PTXError("a partial asynchronous copy")
            data = self.memory.load(self.address(o[1]), mask & (wanted == size), size)
            self.copies[-1].append((self.address(o[0]), mask, data))

    def _matrix_rows(self, i, operand):
        """Addresses of the rows of the 8 x 8 matrices, ``[matrices, threads]``: lane 8 j + r of a warp names row r of matrix j."""
        address = self.address(operand)
        count = int(next(s for s in i.suffixes if re.fullmatch(r"x[124]", s))[1:])
        return [address[(self.threads & ~31) + 8 * matrix + self.threads % 8] for matrix in range(count)]

    def _ldmatrix(self, i, o, mask) -> None:
        lane = self.threads % 32
        for rows, name in zip(self._matrix_rows(i, o[1]), o[0].strip("{} ").split(","), strict=True):
            data = self.shared.load(rows, mask & (lane < 8), 16).reshape(-1, 32, 16)[:, :8]
            words = data.reshape(-1, 8, 8, 2).copy().view(np.uint16)[..., 0]  # [warps, row, column]
            words = words.transpose(0, 2, 1) if "trans" in i.suffixes else words
            pairs = np.ascontiguousarray(words).view(np.uint32)  # [warps, row, pair]
            self.write(name.strip(), pairs.reshape(-1, 32).reshape(-1), mask)

    def _stmatrix(self, i, o, mask) -> None:
        lane = self.threads % 32
        for rows, name in zip(self._matrix_rows(i, o[0]), o[1].strip("{} ").split(","), strict=True):
            words = (
                self.read(name.strip(), "b32").reshape(-1, 8, 4).copy().view(np.uint16)
            )  # [warps, row, column]
            words = words.transpose(0, 2, 1) if "trans" in i.suffixes else words
            data = np.zeros((len(words), 32, 16), np.uint8)
            data[:, :8] = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 8, 16)
            self.shared.store(rows, mask & (lane < 8), data.reshape(-1, 16))

    def _wgmma(self, i, o, mask) -> None:
        if "mma_async" in i.suffixes:
            names, keep = [name.strip() for name in o[0].strip("{} ").split(",")], self.read(o[3], "pred")
            zero = np.zeros(self.threads.shape, np.float32)
            before = np.stack([self.read(name, "f32") if keep.any() else zero for name in names], 1)
            # Behind the predicate: the signs of a and b, always 1 here.
            assert all(int(sign, 0) == 1 for sign in o[4:6]), "a negated operand"
            after = wgmma(
                i.suffixes,
                self.shared.bytes,
                self.read(o[1], "u64"),
                self.read(o[2], "u64"),
                np.where(keep[:, None], before, 0),
                self.shared.BASE,
            )
            for place, name in enumerate(names):
                self.write(name, after[:, place], mask)
