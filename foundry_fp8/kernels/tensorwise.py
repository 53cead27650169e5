"""One scale per tensor: amax, and the cast that writes both layouts, the amax and the bias gradient in one pass.

Bytes moved, for a bf16 tensor of n elements: delayed and unit 2n read + 2n written; current one more read of 2n. The transposed
copy exists because Hopper's FP8 GEMM takes both operands contiguous along the dimension it contracts.

Nothing here waits for the device: scales stay in device memory from the amax to the GEMM.
"""

from typing import NamedTuple

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
    "Cast",
    "Measure",
    "Tensorwise",
    "amax_of_two",
    "quantize_tensorwise",
    "quantize_tensorwise_reference",
]

TILE_R, TILE_C, WARPS = 64, 128, 4
"""One program's tile: it writes 128 bytes of each row and 64 of each row of the transpose. Four warps: what is computed for an address
or a mask serves twice the elements that it would with eight, and four to seven blocks still share a multiprocessor."""

_measures, _casts = BoundedCache(), BoundedCache()


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


def amax_of_two(source: Producer, other: Tensor) -> tuple[Tensor, Tensor]:
    """Max |x| of what two sources produce, NaN ignored, in one launch: of a linear's input and of its weight.

    :func:`foundry_fp8.numerics.quantize.amax_of` is the definition.

    Args:
        source: The first.
        other: The second, ``[R, C]``, hp.

    Returns:
        The two, each the first of three float32 elements.
    """
    second, (found, other_found) = Producer(other), (piece.stats for piece in statistics(source.x.device, 2))
    key = (*source.is_like, aligned(found), *second.is_like)
    known = _measures.get(key)
    if known is None:
        known = _measures[key] = Measure(source, second)
    if known.copies:
        source, second = source.checked(), second.checked()
    known(source.pointers, found, (second.x, second.x.stride(0)), other_found)
    return found, other_found


class Measure:
    """Max |x| of all sources of one kind, or :func:`amax_of_two` of all pairs.

    Args:
        sources: One or two of that kind: :attr:`Producer.is_like` distinguishes kinds.
    """

    __slots__ = ("_launch", "_other_sizes", "_sizes", "copies")

    def __init__(self, *sources: Producer) -> None:
        checked = [source.checked() for source in sources]
        programs = sum(tiles(one.x.shape[0], TILE_R) * tiles(one.x.shape[1], TILE_C) for one in checked)
        constants = {"KIND": sources[0].kind, "TILE_R": TILE_R, "TILE_C": TILE_C, "num_warps": WARPS}
        self._launch = Launch(_amax_kernel, programs, **constants, **AS_WRITTEN)
        self.copies = any(one is not source for one, source in zip(checked, sources, strict=True))
        self._sizes, *others = (tuple(one.x.shape) for one in checked)
        self._other_sizes: tuple[int | None, ...] = others[0] if others else (None, None)

    def __call__(
        self,
        pointers: tuple[object, ...],
        out: Tensor,
        other: tuple[Tensor | None, int | None] = (None, None),
        other_out: Tensor | None = None,
    ) -> None:
        """Raise ``out`` and ``other_out``.

        Args:
            pointers: Of the first source, checked.
            out: One float32 element, aligned alike at every call.
            other: The second source, checked, and its stride.
            other_out: Aligned alike, too.
        """
        self._launch(*pointers, out, *self._sizes, *other, other_out, *self._other_sizes)


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
    """

    __slots__ = (
        "_device",
        "_dtype",
        "_launch",
        "_measure",
        "_shape",
        "_shape_t",
        "_sizes",
        "_sums",
        "copies",
    )

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
        self._launch = Launch(
            _quantize_kernel,
            max(tiles_r * tiles_c, 1),
            KIND=source.kind,
            FMT_MAX=fmt.max,
            POWER_2=power_2,
            VALUE_FOR_INF=FLOAT32_MAX,
            STRIDE=STATS_STRIDE,
            TILE_R=TILE_R,
            TILE_C=TILE_C,
            num_warps=WARPS,
            **AS_WRITTEN,
        )
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
        empty, dtype, device = torch.empty, self._dtype, self._device
        data = data_t = None
        if self._shape is not None:
            data = empty(self._shape, dtype=dtype, device=device)
            data_t = None if self._shape_t is None else data.new_empty(self._shape_t)  # cheaper for the host
        elif self._shape_t is not None:
            data_t = empty(self._shape_t, dtype=dtype, device=device)
        partial = None if self._sums is None else empty(self._sums, dtype=torch.float32, device=device)
        if known_amax is None:
            known_amax = stats
            if scale is None and self._measure is not None:
                self._measure(pointers, stats)
        self._launch(*pointers, scale, amax_slot, known_amax, stats, data, data_t, partial, *self._sizes)
        return data, data_t, None if partial is None else partial.sum(0)


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
    x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr,
    amax_ptr, R, C, other_ptr, other_stride, other_amax_ptr, other_R, other_C,
    KIND: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles = tl.cdiv(R, TILE_R) * tl.cdiv(C, TILE_C)
    if other_ptr is None:  # noqa: SIM114 - the compiler decides it
        raise_amax(
            (x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr),
            amax_ptr, R, C, tile, KIND, TILE_R, TILE_C,
        )  # fmt: skip
    elif tile < tiles:
        raise_amax(
            (x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr),
            amax_ptr, R, C, tile, KIND, TILE_R, TILE_C,
        )  # fmt: skip
    else:
        raise_amax(
            (other_ptr, other_stride, None, 0, None, None, None, None),
            other_amax_ptr, other_R, other_C, tile - tiles, 0, TILE_R, TILE_C,
        )  # fmt: skip


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
    scale_ptr, slot_ptr, amax_ptr, stats_ptr, data_ptr, data_t_ptr, partial_ptr,
    R, C, padded_R, padded_C, constant, gemm_constant,
    KIND: tl.constexpr, FMT_MAX: tl.constexpr, POWER_2: tl.constexpr, VALUE_FOR_INF: tl.constexpr,
    STRIDE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles_c = tl.maximum(tl.cdiv(padded_C, TILE_C), 1)
    tile_r = pid // tiles_c
    first_row = tile_r * TILE_R
    first_column = (pid % tiles_c) * TILE_C
    a, b, c, d = load_interleaved(
        (x_ptr, x_stride, up_ptr, up_stride, mean_ptr, rstd_ptr, weight_ptr, bias_ptr),
        first_row, first_column, R, C, KIND, TILE_R, TILE_C,
    )  # fmt: skip

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
