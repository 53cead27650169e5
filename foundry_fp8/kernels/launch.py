"""What every kernel launch shares: is Triton here, may this tensor go in, where do padded sizes end.

Kernel files import Triton at their top, so they are imported only where they are used; this file and ``sources.py`` are what may be
imported anywhere. Under ``TRITON_INTERPRET=1`` the same kernels run on CPU tensors, which is how they are tested without a GPU.
"""

import ctypes
import functools
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = [
    "AS_WRITTEN", "CONTRACTED", "GEMM_MULTIPLE", "HP_DTYPES", "BoundedCache", "Launch", "aligned", "alignments",
    "as_rows", "check_hp", "check_tiles", "compiler_missing", "driver_version", "interpreting", "launch",
    "on_current_device", "on_its_device", "round_up", "tiles", "triton_missing",
]  # fmt: skip

F = TypeVar("F", bound=Callable)

HP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels read and write outside FP8."""

GEMM_MULTIPLE = 16
"""The FP8 GEMMs want rows of whole 16-byte words; the quantise kernels pad with zeros up to it."""


AS_WRITTEN: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch option of the kernels that are defined to the bit: a product and a sum stay two roundings.

By default Triton and ptxas contract ``a * b + c`` to one. Rounding to a whole number by ``(x * scale + 1.5 * 2**23) - 1.5 * 2**23``
then rounds the exact product, and the reference the float32 one: other codes at ties, which 16-bit inputs hit.
"""

CONTRACTED: dict[str, Any] = {"enable_fp_fusion": True}
"""Launch option of the others: Triton 3.10 no longer contracts by default, as Triton 3.9 announces."""


def triton_missing() -> str | None:
    """Why the kernels cannot be imported, or ``None``."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton; it comes with torch's CUDA wheels on Linux)"
    return None


def driver_version() -> tuple[int, ...] | None:
    """The newest CUDA that the installed driver supports; asking needs no GPU. ``None`` without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    packed = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(packed)):
        return None
    return packed.value // 1000, packed.value % 1000 // 10


def compiler_missing() -> str | None:
    """Why Triton could not build what launches its kernels, a C extension of this Python; ``None`` if it can."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton builds its launchers with a C compiler, and there is neither gcc nor clang here, nor is CC set"
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        return "Triton builds its launchers against Python's headers, and there is no Python.h here"
    return None


def interpreting() -> bool:
    """Whether Triton runs its interpreter, in which the kernels take CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def round_up(size: int, multiple: int = GEMM_MULTIPLE) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return (size + multiple - 1) // multiple * multiple


def tiles(size: int, tile: int) -> int:
    """How many tiles of ``tile`` cover ``size``; ``triton.cdiv`` in plain Python, which newer Tritons' is not."""
    return -(-size // tile)


def check_tiles(rows: int, columns: int, tile_rows: int, tile_columns: int) -> None:
    """Raise where an offset inside a tile, which is of 32 bits, would wrap. With 64 bits a cast takes up to 2 % more instructions.

    Args:
        rows: Padded rows: from one row of the transpose to the next.
        columns: From one row to the next, of what is read or written.
        tile_rows: Rows of a program's tile.
        tile_columns: Its columns.

    Raises:
        ValueError: ``rows`` or ``columns`` are too many.
    """
    if tile_columns * rows > 2**31 or tile_rows * columns > 2**31:
        raise ValueError(
            f"a tensor of {rows} rows, {columns} elements from one to the next, cannot be quantised at once: the kernels reach "
            f"{2**31 // tile_columns} rows and {2**31 // tile_rows} elements. Use a smaller microbatch (device_train_microbatch_size)."
        )


def check_hp(name: str, x: Tensor) -> None:
    """Raise unless ``x`` can be read by a kernel.

    Raises:
        TypeError: Not float32, bfloat16 or float16.
        ValueError: Not two-dimensional, or on a device that runs no Triton kernel.
    """
    if x.dtype not in HP_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in HP_DTYPES)
        raise TypeError(f"{name} is {str(x.dtype).removeprefix('torch.')}; the FP8 kernels take {allowed}.")
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; the FP8 kernels take 2 dimensions.")
    if x.device.type != "cuda" and not interpreting():
        raise ValueError(
            f"{name} is on {x.device}; the native kernels run on CUDA devices. "
            "Use backend: emulated here, or set TRITON_INTERPRET=1 before the first import to run them interpreted."
        )


def on_current_device(x: Tensor) -> bool:
    """Whether Triton would launch where ``x`` is: on the current device."""
    return not x.is_cuda or torch.cuda.device_count() < 2 or x.get_device() == torch.cuda.current_device()


def on_its_device(function: F) -> F:
    """Run ``function`` with the device of its first argument, a tensor, as the current one.

    torch's own operators do so; Triton launches on whatever device is current.
    """

    @functools.wraps(function)
    def run(first, *args, **kwargs):  # type: ignore[no-untyped-def]
        if not first.is_cuda or torch.cuda.device_count() < 2:
            return function(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return function(first, *args, **kwargs)

    return run  # type: ignore[return-value]


KNOWN = 4096
"""Kinds of calls that are remembered before all are forgotten: keys hold the number of tokens."""


class BoundedCache(dict[tuple[Any, ...], Any]):
    """What all calls of one kind have in common, by what distinguishes the kinds."""

    def __setitem__(self, key: tuple[Any, ...], value: Any) -> None:
        if len(self) >= KNOWN:
            self.clear()
        super().__setitem__(key, value)


def aligned(x: Tensor) -> bool:
    """What Triton specialises on of an address; of memory that was allocated for it (``torch.empty``) it is always true."""
    # Of fake tensors, with which kernels are compiled and not launched, torch warns who asks.
    if type(x) is not Tensor and type(x).__name__ == "FakeTensor":
        return True
    return x.data_ptr() % 16 == 0


def alignments(*tensors: Tensor) -> list[bool]:
    """:func:`aligned` of each, at the price of one call."""
    if type(tensors[0]).__name__ == "FakeTensor":
        return [True] * len(tensors)
    return [x.data_ptr() % 16 == 0 for x in tensors]


class Launch:
    """``kernel[(programs,)](*args, **constants)``, at a fraction of the host's time from the second call on.

    Triton binds arguments, names their specialisation in a string and looks up what it compiled at every launch; that costs more
    than the launch. Here the compiled kernel is kept from the first one, and called itself. So an object of this class serves
    arguments that Triton specialises on alike: of the same dtypes, sizes and device, and :func:`aligned` alike.

    Args:
        kernel: A ``triton.jit`` function whose ``constexpr`` parameters come last.
        programs: Size of the grid; with 0 nothing is launched.
        constants: The ``constexpr`` parameters and launch options.
    """

    __slots__ = ("_again", "_constants", "_kernel", "_programs", "_values")

    def __init__(self, kernel: Any, programs: int, **constants: Any) -> None:
        self._kernel, self._programs, self._constants = kernel, programs, {**CONTRACTED, **constants}
        self._again: Callable[..., None] | None = None
        self._values: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """The kernel's."""
        found: str = self._kernel.__name__
        return found

    def __call__(self, *args: Any) -> None:
        """Launch it.

        Args:
            args: Values of the other parameters, in order: tensors, integers, floats and ``None``.
        """
        if self._again is not None:
            self._again(*args, *self._values)
            return
        if self._programs == 0:
            return
        compiled = self._kernel[(self._programs,)](*args, **self._constants)
        if compiled is not None:  # not the interpreter's
            self._values = tuple(self._constants[name] for name in self._kernel.arg_names[len(args) :])
            self._again = compiled[self._programs, 1, 1]


_launches = BoundedCache()


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """The :class:`Launch` of arguments of this kind, found by each of them.

    Where there are many of them, remember the :class:`Launch` by what you know of them instead.

    Args:
        kernel: See :class:`Launch`.
        programs: See :class:`Launch`.
        args: See :meth:`Launch.__call__`.
        constants: See :class:`Launch`; in the same order at every call of a place.
    """
    key = (kernel, programs, *_specialization(args, constants))
    known = _launches.get(key)
    if known is None:
        known = _launches[key] = Launch(kernel, programs, **constants)
    known(*args)


def _specialization(args: tuple[Any, ...], constants: dict[str, Any]) -> list[Any]:
    key: list[Any] = [*constants.values()]
    for value in args:
        if value is None:
            key.append(None)
        elif type(value) is int:
            # Triton compiles for 1, for multiples of 16, and for 32 bits.
            narrow = 0 if -(2**31) <= value < 2**31 else 4
            key.append(narrow + (2 if value == 1 else value % 16 == 0))
        elif isinstance(value, Tensor):
            key += value.dtype, value.get_device(), aligned(value)
        else:
            key.append(type(value))
    return key


def as_rows(x: Tensor) -> Tensor:
    """``x`` (two-dimensional) with unit stride along its rows; copied only if it has not. Row stride may be anything."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
