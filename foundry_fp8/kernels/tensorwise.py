"""One scale per tensor: amax, and the cast that writes both layouts, the amax and the bias gradient in one pass.

Bytes moved, for a bf16 tensor of n elements: delayed and unit 2n read + 2n written; current one more read of 2n. The transposed
copy exists because Hopper's FP8 GEMM takes both operands contiguous along the dimension it contracts.

Nothing here waits for the device: scales stay in device memory from the amax to the GEMM.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.interleaved import largest_of, load_interleaved, store_interleaved, store_transposed
from foundry_fp8.kernels.launch import (
    AS_WRITTEN,
    GEMM_MULTIPLE,
    BoundedCache,
    Launch,
    aligned,
    check_tiles,
    round_up,
    tiles,
)
from foundry_fp8.kernels.producers import Producer, load_tile
from foundry_fp8.kernels.scales import amax_along, is_inf, nan_for_inf, reciprocal, scale_from_amax
from foundry_fp8.kernels.zeros import STRIDE as STATS_STRIDE
from foundry_fp8.kernels.zeros import statistics
from foundry_fp8.numerics.formats import Float8Format
from foundry_fp8.numerics.quantize import FLOAT32_MAX, quantize_constant, quantize_tensor
from foundry_fp8.numerics.quantize import amax_of as amax_reference
from foundry_fp8.numerics.quantize import scale_from_amax as scale_reference

__all__ = [
    "Cast", "Casts", "Measure", "Tensorwise", "quantize_tensorwise", "quantize_tensorwise_reference",
]  # fmt: skip

TILE_R, TILE_C, WARPS = 64, 128, 4
"""One program's tile: it writes 128 bytes of each row and 64 of each row of the transpose. Four warps: what is computed for an address
or a mask serves twice the elements that it would with eight, and four to seven blocks still share a multiprocessor."""

OTHERS = 3
"""Tensors in memory that are measured or quantised in one launch with a first one, which may be produced: three weights with their input."""

_casts = BoundedCache()


class Tensorwise(NamedTuple):
    """A tensor quantised with one scale."""

    data: Tensor | None
    """FP8 ``[R', C']``: R and C rounded up to 16, zeros outside; ``None`` if not asked for."""
    data_t: Tensor | None
    """FP8 ``[C', R']``: its transpose; ``None`` if not asked for."""
    stats: Tensor
    """float32 ``[3]``: amax, gemm_scale, scale_inv. ``scale_inv`` is ``1 / scale``; ``gemm_scale`` is the same, or NaN if the tensor
    held an Inf. Of a constant scale: 0, ``alpha / scale``, ``1 / scale``."""
    column_sum: Tensor | None
    """float32 ``[C]``: the sum over rows of the hp value; ``None`` if not asked for."""


class Measure:
    """Max |x| of all sources of one kind, or in one launch of several.

    Args:
        sources: One, and up to :data:`OTHERS` tensors in memory; :attr:`Producer.is_like` distinguishes kinds.
    """

    __slots__ = ("_launch", "_missing", "_sizes")

    def __init__(self, *sources: Producer) -> None:
        checked = [source.checked() for source in sources]
        programs = sum(tiles(one.x.shape[0], TILE_R) * tiles(one.x.shape[1], TILE_C) for one in checked)
        constants = {"KIND": sources[0].kind, "TILE_R": TILE_R, "TILE_C": TILE_C, "num_warps": WARPS}
        kernel = _amax_kernel if len(sources) == 1 else _amax_together_kernel
        self._launch = Launch(kernel, programs, **constants, **AS_WRITTEN)
        self._sizes = [tuple(one.x.shape) for one in checked]
        # A pointer, a stride, an amax and two sizes of each tensor that is not there.
        self._missing = (None,) * (0 if len(sources) == 1 else 5 * (OTHERS + 1 - len(sources)))

    def __call__(self, *sources: tuple[tuple[Any, ...], Tensor]) -> None:
        """Raise one float32 element for each source, aligned alike at every call; ``sources``: pointers (checked) and that element."""
        args: list[Any] = []
        for (pointers, amax), (rows, columns) in zip(sources, self._sizes, strict=True):
            args += pointers[:2] if args else pointers
            args += amax, rows, columns
        self._launch(*args, *self._missing)


def quantize_tensorwise(
    source: Producer,
    fmt: Float8Format,
    *,
    scale: Tensor | None = None,
    known_amax: Tensor | None = None,
    power_2: bool = False,
    amax_slot: Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    column_sum: bool = False,
    constant: float | None = None,
    alpha: float = 1.0,
) -> Tensorwise:
    """Quantise with one scale; :func:`quantize_tensorwise_reference` is the definition.

    Args:
        source: What to quantise, ``[R, C]``.
        fmt: The number format.
        scale: One float32 element on the device: delayed scaling. ``None`` takes the scale from this tensor's amax, at
            the price of a second pass: current scaling.
        known_amax: float32: its first element is the amax, if it was measured before. Saves current scaling its second pass; not
            to be given with ``scale``.
        power_2: Round a scale taken from the amax down to a power of two.
        amax_slot: One float32 element, raised in place to this tensor's amax if that is larger.
        rows: Write ``data``.
        columns: Write ``data_t``.
        column_sum: Sum the columns (the bias gradient), in a fixed order: the result is deterministic.
        constant: A scale that is known now, a power of two: nothing is measured, and Inf becomes NaN. Alone: without
            ``scale``, ``known_amax`` and ``amax_slot``.
        alpha: What gemm_scale holds besides a constant scale's reciprocal.
    """
    key = (
        *source.is_like, fmt.name, power_2, rows, columns, column_sum, constant, alpha,
        None if scale is None else aligned(scale), None if known_amax is None else aligned(known_amax),
        None if amax_slot is None else aligned(amax_slot),
    )  # fmt: skip
    known = _casts.get(key)
    if known is None:
        options = {"rows": rows, "columns": columns, "column_sum": column_sum}
        known = _casts[key] = Cast(source, fmt, power_2=power_2, constant=constant, alpha=alpha, **options)
    if known.copies:
        source = source.checked()
    (piece,) = statistics(source.x.device, 1)  # zero, as atomics raise them
    data, data_t, summed = known(source.pointers, piece.stats, scale, known_amax, amax_slot)
    return Tensorwise(data, data_t, piece.stats, summed)


class Cast:
    """:func:`quantize_tensorwise` of all sources of one kind (:attr:`Producer.is_like`), with the same options.

    Attributes:
        copies: Sources of this kind have to be copied (:meth:`Producer.checked`).
        constants: The kernel's.
        programs: How many of it quantise one source.
    """

    __slots__ = ("_device", "_dtype", "_launch", "_measure", "_shape", "_shape_t", "_sizes", "_sums", "constants", "copies", "programs")  # fmt: skip

    def __init__(
        self,
        source: Producer,
        fmt: Float8Format,
        *,
        power_2: bool,
        rows: bool,
        columns: bool,
        column_sum: bool,
        constant: float | None = None,
        alpha: float = 1.0,
    ) -> None:
        checked = source.checked()
        r, c = checked.x.shape
        padded_r, padded_c = round_up(r), round_up(c)
        check_tiles(padded_r, max(padded_c, *checked.strides), TILE_R, TILE_C)
        tiles_r, tiles_c = tiles(padded_r, TILE_R), tiles(padded_c, TILE_C)
        self.programs = max(tiles_r * tiles_c, 1)
        self.constants = {
            "KIND": source.kind, "FMT_MAX": fmt.max, "POWER_2": power_2, "VALUE_FOR_INF": FLOAT32_MAX,
            "STRIDE": STATS_STRIDE, "TILE_R": TILE_R, "TILE_C": TILE_C, "num_warps": WARPS, **AS_WRITTEN,
        }  # fmt: skip
        self._launch = Launch(_quantize_kernel, self.programs, **self.constants)
        self._measure = Measure(checked) if constant is None else None
        self.copies = checked is not source
        self._device, self._dtype = source.x.device, fmt.dtype
        self._shape = (padded_r, padded_c) if rows else None
        self._shape_t = (padded_c, padded_r) if columns else None
        self._sums = (tiles_r, c) if column_sum else None
        self._sizes = (r, c, padded_r, padded_c, constant, None if constant is None else alpha / constant)

    def __call__(
        self,
        pointers: tuple[object, ...],
        stats: Tensor,
        scale: Tensor | None,
        known_amax: Tensor | None,
        amax_slot: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Quantise a source of this kind.

        Args:
            pointers: Of the source, checked.
            stats: A piece of :func:`~foundry_fp8.kernels.zeros.statistics`; what :attr:`Tensorwise.stats` says is written to it.
            scale: As of :func:`quantize_tensorwise`; given, or aligned, at every call or at none, like those that follow.
            known_amax: The same; may be ``stats``.
            amax_slot: The same.

        Returns:
            ``data``, ``data_t`` and ``column_sum`` of :class:`Tensorwise`.
        """
        if known_amax is None and scale is None and self._measure is not None:
            self._measure((pointers, stats))
        arguments = self.arguments(stats, scale, known_amax, amax_slot)
        self._launch(*pointers, *arguments)
        return self.made(arguments)

    def arguments(
        self, stats: Tensor, scale: Tensor | None, known_amax: Tensor | None, amax_slot: Tensor | None
    ) -> tuple[Any, ...]:
        """What the kernel takes of one source beside its pointers, with memory for what it makes."""
        empty, dtype, device = torch.empty, self._dtype, self._device
        data = data_t = None
        if self._shape is not None:
            data = empty(self._shape, dtype=dtype, device=device)
            data_t = None if self._shape_t is None else data.new_empty(self._shape_t)  # cheaper for the host
        elif self._shape_t is not None:
            data_t = empty(self._shape_t, dtype=dtype, device=device)
        partial = None if self._sums is None else empty(self._sums, dtype=torch.float32, device=device)
        amax = stats if known_amax is None else known_amax
        return scale, amax_slot, amax, stats, data, data_t, *self._sizes, partial

    @staticmethod
    def made(arguments: tuple[Any, ...]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What :meth:`__call__` returns."""
        _, _, _, _, data, data_t, *_, partial = arguments
        return data, data_t, None if partial is None else partial.sum(0)


class Casts:
    """Several sources in one launch, each as its :class:`Cast` would quantise it alone; none has to be measured.

    Args:
        casts: The first of any source; up to :data:`OTHERS` more of tensors in memory, of one format, without column sums.
    """

    __slots__ = ("_casts", "_launch", "_missing")

    def __init__(self, casts: Sequence[Cast]) -> None:
        self._casts, (first, *others) = casts, casts
        constants = first.constants | {"OTHERS_MAX": others[0].constants["FMT_MAX"]}
        self._launch = Launch(_quantize_together_kernel, sum(one.programs for one in casts), **constants)
        self._missing = (None,) * (14 * (OTHERS - len(others)))  # arguments of each tensor that is not there

    def __call__(self, sources: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """What each one's :meth:`Cast.__call__` returns; ``sources``: what it takes."""
        args: list[Any] = []
        arguments = []
        for cast, (pointers, *given) in zip(self._casts, sources, strict=True):
            arguments.append(its := cast.arguments(*given))
            args += pointers[:2] + its[:-1] if args else pointers + its
        self._launch(*args, *self._missing)
        return [Cast.made(its) for its in arguments]


def quantize_tensorwise_reference(
    source: Producer,
    fmt: Float8Format,
    *,
    scale: Tensor | None = None,
    known_amax: Tensor | None = None,
    power_2: bool = False,
    amax_slot: Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    column_sum: bool = False,
    constant: float | None = None,
    alpha: float = 1.0,
) -> Tensorwise:
    """The torch expression that :func:`quantize_tensorwise` computes, bit for bit (``column_sum`` up to its order)."""
    x = source.reference()
    if constant is not None:
        q = quantize_constant(x, constant, fmt)
        gemm_scale = torch.full_like(q.amax, alpha / constant)
    else:
        measured = amax_reference(x) if known_amax is None else known_amax.flatten()[0]
        if amax_slot is not None:
            amax_slot.copy_(torch.maximum(amax_slot, measured.reshape(amax_slot.shape)))
        scale = scale_reference(measured, fmt, power_2=power_2) if scale is None else scale.reshape(())
        q = quantize_tensor(x, scale, fmt, measured)
        gemm_scale = q.gemm_scale
    stats, padded = torch.stack([q.amax, gemm_scale, q.scale_inv]), pad_to_multiple(q.data)
    data, data_t = padded if rows else None, padded.t().contiguous() if columns else None
    return Tensorwise(data, data_t, stats, x.float().sum(0) if column_sum else None)


def pad_to_multiple(data: Tensor, multiple: int = GEMM_MULTIPLE) -> Tensor:
    """``data`` ``[R, C]`` (FP8) with rows and columns of zeros up to the next multiple."""
    r, c = data.shape
    padded = torch.zeros((round_up(r, multiple), round_up(c, multiple)), dtype=data.dtype, device=data.device)
    padded[:r, :c] = data
    return padded


@triton.jit
def _amax_kernel(
    x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, amax_ptr, R, C,
    KIND: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    raise_amax(
        (x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr),
        amax_ptr, R, C, tl.program_id(0), KIND, TILE_R, TILE_C,
    )  # fmt: skip


@triton.jit
def _amax_together_kernel(
    x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, amax_ptr, R, C,
    a_ptr, a_stride, a_amax_ptr, a_R, a_C,
    b_ptr, b_stride, b_amax_ptr, b_R, b_C,
    c_ptr, c_stride, c_amax_ptr, c_R, c_C,
    KIND: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """The same of a first source, and of one to three tensors in memory."""
    tile = tl.program_id(0)
    tiles = tl.cdiv(R, TILE_R) * tl.cdiv(C, TILE_C)
    if tile < tiles:
        raise_amax(
            (x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr),
            amax_ptr, R, C, tile, KIND, TILE_R, TILE_C,
        )  # fmt: skip
    else:
        tile -= tiles
        tiles = _raise_other(a_ptr, a_stride, a_amax_ptr, a_R, a_C, tile, TILE_R, TILE_C)
        if b_ptr is not None:
            tile -= tiles
            tiles = _raise_other(b_ptr, b_stride, b_amax_ptr, b_R, b_C, tile, TILE_R, TILE_C)
        if c_ptr is not None:
            _raise_other(c_ptr, c_stride, c_amax_ptr, c_R, c_C, tile - tiles, TILE_R, TILE_C)


@triton.jit
def _raise_other(x_ptr, x_stride, amax_ptr, R, C, tile, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """:func:`raise_amax` where ``tile`` is one of this tensor's, of which there are so many."""
    tiles = tl.cdiv(R, TILE_R) * tl.cdiv(C, TILE_C)
    if (tile >= 0) & (tile < tiles):
        raise_amax(
            (x_ptr, x_stride, None, 0, None, None, None, None), amax_ptr, R, C, tile, 0, TILE_R, TILE_C
        )
    return tiles


@triton.jit
def raise_amax(source, amax_ptr, R, C, tile, KIND: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Raise ``amax_ptr`` to the amax of one tile; ``source``: what :attr:`Producer.pointers` has."""
    tiles_c = tl.cdiv(C, TILE_C)
    first_row, first_column = (tile // tiles_c) * TILE_R, (tile % tiles_c) * TILE_C
    x = load_tile(*source, first_row, first_column, R, C, KIND, TILE_R, TILE_C)
    tl.atomic_max(amax_ptr, amax_along(tl.max(tl.abs(x), axis=1), 0), sem="relaxed")


@triton.jit
def _quantize_kernel(
    x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr,
    scale_ptr, slot_ptr, amax_ptr, stats_ptr, data_ptr, data_t_ptr, R, C, padded_R, padded_C, constant, gemm_constant, partial_ptr,
    KIND: tl.constexpr, FMT_MAX: tl.constexpr, POWER_2: tl.constexpr, VALUE_FOR_INF: tl.constexpr,
    STRIDE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    _quantize_tile(
        (x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr),
        scale_ptr, slot_ptr, amax_ptr, stats_ptr, data_ptr, data_t_ptr, R, C, padded_R, padded_C, constant, gemm_constant, partial_ptr,
        tl.program_id(0), KIND, FMT_MAX, POWER_2, VALUE_FOR_INF, STRIDE, TILE_R, TILE_C,
    )  # fmt: skip


@triton.jit
def _quantize_together_kernel(
    x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr,
    scale_ptr, slot_ptr, amax_ptr, stats_ptr, data_ptr, data_t_ptr, R, C, padded_R, padded_C, constant, gemm_constant, partial_ptr,
    a_ptr, a_stride, a_scale_ptr, a_slot_ptr, a_amax_ptr, a_stats_ptr, a_data_ptr, a_data_t_ptr,
    a_R, a_C, a_padded_R, a_padded_C, a_constant, a_gemm_constant,
    b_ptr, b_stride, b_scale_ptr, b_slot_ptr, b_amax_ptr, b_stats_ptr, b_data_ptr, b_data_t_ptr,
    b_R, b_C, b_padded_R, b_padded_C, b_constant, b_gemm_constant,
    c_ptr, c_stride, c_scale_ptr, c_slot_ptr, c_amax_ptr, c_stats_ptr, c_data_ptr, c_data_t_ptr,
    c_R, c_C, c_padded_R, c_padded_C, c_constant, c_gemm_constant,
    KIND: tl.constexpr, FMT_MAX: tl.constexpr, OTHERS_MAX: tl.constexpr, POWER_2: tl.constexpr, VALUE_FOR_INF: tl.constexpr,
    STRIDE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """The same of a first source, and of one to three tensors in memory."""
    pid = tl.program_id(0)
    programs = _programs(padded_R, padded_C, TILE_R, TILE_C)
    if pid < programs:
        _quantize_tile(
            (x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr),
            scale_ptr, slot_ptr, amax_ptr, stats_ptr, data_ptr, data_t_ptr, R, C, padded_R, padded_C, constant, gemm_constant, partial_ptr,
            pid, KIND, FMT_MAX, POWER_2, VALUE_FOR_INF, STRIDE, TILE_R, TILE_C,
        )  # fmt: skip
    else:
        pid -= programs
        programs = _quantize_other(
            a_ptr, a_stride, a_scale_ptr, a_slot_ptr, a_amax_ptr, a_stats_ptr, a_data_ptr, a_data_t_ptr,
            a_R, a_C, a_padded_R, a_padded_C, a_constant, a_gemm_constant,
            pid, OTHERS_MAX, POWER_2, VALUE_FOR_INF, STRIDE, TILE_R, TILE_C,
        )  # fmt: skip
        if b_ptr is not None:
            pid -= programs
            programs = _quantize_other(
                b_ptr, b_stride, b_scale_ptr, b_slot_ptr, b_amax_ptr, b_stats_ptr, b_data_ptr, b_data_t_ptr,
                b_R, b_C, b_padded_R, b_padded_C, b_constant, b_gemm_constant,
                pid, OTHERS_MAX, POWER_2, VALUE_FOR_INF, STRIDE, TILE_R, TILE_C,
            )  # fmt: skip
        if c_ptr is not None:
            _quantize_other(
                c_ptr, c_stride, c_scale_ptr, c_slot_ptr, c_amax_ptr, c_stats_ptr, c_data_ptr, c_data_t_ptr,
                c_R, c_C, c_padded_R, c_padded_C, c_constant, c_gemm_constant,
                pid - programs, OTHERS_MAX, POWER_2, VALUE_FOR_INF, STRIDE, TILE_R, TILE_C,
            )  # fmt: skip


@triton.jit
def _programs(padded_R, padded_C, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    return tl.maximum(tl.cdiv(padded_R, TILE_R) * tl.cdiv(padded_C, TILE_C), 1)


@triton.jit
def _quantize_other(
    x_ptr, x_stride, scale_ptr, slot_ptr, amax_ptr, stats_ptr, data_ptr, data_t_ptr,
    R, C, padded_R, padded_C, constant, gemm_constant, pid,
    FMT_MAX: tl.constexpr, POWER_2: tl.constexpr, VALUE_FOR_INF: tl.constexpr,
    STRIDE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """:func:`_quantize_tile` where ``pid`` is one of this tensor's, of which there are so many."""
    programs = _programs(padded_R, padded_C, TILE_R, TILE_C)
    if (pid >= 0) & (pid < programs):
        _quantize_tile(
            (x_ptr, x_stride, None, 0, None, None, None, None),
            scale_ptr, slot_ptr, amax_ptr, stats_ptr, data_ptr, data_t_ptr, R, C, padded_R, padded_C, constant, gemm_constant, None,
            pid, 0, FMT_MAX, POWER_2, VALUE_FOR_INF, STRIDE, TILE_R, TILE_C,
        )  # fmt: skip
    return programs


@triton.jit
def _quantize_tile(
    source,
    scale_ptr, slot_ptr, amax_ptr, stats_ptr, data_ptr, data_t_ptr, R, C, padded_R, padded_C, constant, gemm_constant, partial_ptr,
    pid, KIND: tl.constexpr, FMT_MAX: tl.constexpr, POWER_2: tl.constexpr, VALUE_FOR_INF: tl.constexpr,
    STRIDE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    tiles_c = tl.maximum(tl.cdiv(padded_C, TILE_C), 1)
    tile_r = pid // tiles_c
    first_row = tile_r * TILE_R
    first_column = (pid % tiles_c) * TILE_C
    a, b, c, d = load_interleaved(source, first_row, first_column, R, C, KIND, TILE_R, TILE_C)

    if constant is not None:
        scale = tl.full((), constant, tl.float32)
        scale_inv = reciprocal(scale)
        if pid == 0:
            tl.store(stats_ptr, 0.0)
            tl.store(stats_ptr + STRIDE, gemm_constant)
    elif scale_ptr is None:
        amax = tl.load(amax_ptr)
        scale = scale_from_amax(amax, FMT_MAX, POWER_2, VALUE_FOR_INF)
        scale_inv = reciprocal(scale)
        if pid == 0:
            tl.store(stats_ptr, amax)
            tl.store(stats_ptr + STRIDE, tl.where(is_inf(amax), float("nan"), scale_inv))
    else:
        scale = tl.load(scale_ptr)
        scale_inv = reciprocal(scale)
        amax = amax_along(tl.max(largest_of(a, b, c, d), axis=1), 0)
        tl.atomic_max(stats_ptr, amax, sem="relaxed")
        # Raised as integers: the bits of NaN lie above those of every positive float, so one Inf anywhere wins.
        if (pid == 0) | is_inf(amax):
            bits_ptr = stats_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            tl.atomic_max(
                bits_ptr + STRIDE,
                tl.where(is_inf(amax), float("nan"), scale_inv).to(tl.int32, bitcast=True),
                sem="relaxed",
            )
    if pid == 0:
        tl.store(stats_ptr + 2 * STRIDE, scale_inv)
    if slot_ptr is not None:
        tl.atomic_max(slot_ptr, amax, sem="relaxed")

    if partial_ptr is not None:
        columns = first_column + tl.arange(0, TILE_C)
        tl.store(partial_ptr + tile_r * C + columns, tl.sum((a + b) + (c + d), axis=0), mask=columns < C)
    if constant is not None:
        a, b, c, d = nan_for_inf(a), nan_for_inf(b), nan_for_inf(c), nan_for_inf(d)
    a, b, c, d = a * scale, b * scale, c * scale, d * scale  # the stores' conversion saturates
    if data_ptr is not None:
        store_interleaved(data_ptr, a, b, c, d, first_row, first_column, padded_R, padded_C, TILE_R, TILE_C)
    if data_t_ptr is not None:
        RUN: tl.constexpr = 8 if data_ptr is None else 16
        store_transposed(
            data_t_ptr, a, b, c, d, first_row, first_column, padded_R, padded_C, TILE_R, TILE_C, RUN
        )
