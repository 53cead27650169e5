"""What eager passes of a linear have in common, found once a pass: otherwise each kernel would look for its own.

A pass is a linear's forward (of x and the weight) or its backward (of dy and the weight). Two are of one kind if nothing differs on
which a launch depends: the plan, and of every tensor the shape, strides, dtype, device and whether its address is aligned. All of
that is read at every pass; what is kept for a kind are launches and sizes, never a tensor of a pass, a stream or a scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_fp8.backends.native.inputs import Delayed
from foundry_fp8.backends.native.operand import Source
from foundry_fp8.backends.native.plan import FORMATS, Layout, Plan
from foundry_fp8.kernels.blockwise import BlockCast
from foundry_fp8.kernels.launch import BoundedCache, as_rows
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.kernels.tensorwise import Cast, Measure
from foundry_fp8.kernels.zeros import Statistics, statistics
from foundry_fp8.numerics.recipes import Operand

__all__ = ["EagerPass", "Kind", "eager_pass"]

_passes = BoundedCache()


class Kind:
    """The tensors of one kind that are one operand under one plan, as :class:`EagerPass` distinguishes kinds."""

    __slots__ = ("_casts", "_nothing", "_operand", "_plan", "copies", "rest")

    def __init__(self, operand: Operand, source: Source, plan: Plan) -> None:
        self._operand, self._plan = operand, plan
        self._casts: dict[tuple[object, ...], Any] = {}
        self.rest = Producer(*source).checked().pointers[1:]
        self.copies = as_rows(source.x) is not source.x
        with torch.inference_mode(False):  # it may be saved for backward
            self._nothing = source.x.new_empty((0,))

    def pointers(self, x: Tensor, source: Source) -> tuple[object, ...]:
        """What kernels take of one of them that is more than the tensor ``x``, of which they take it and :attr:`rest`."""
        _, up, mean, rstd, weight, bias, alpha, _ = source
        return x, self.rest[0], up, self.rest[2], mean, rstd, weight, bias, alpha

    def quantize(
        self,
        x: Tensor,
        piece: Statistics | None,
        *,
        source: Source | None = None,
        rows: bool,
        columns: bool,
        column_sum: bool = False,
        scale: Tensor | None = None,
        known_amax: Tensor | None = None,
        amax_slot: Tensor | None = None,
    ) -> tuple[Layout, Layout, Tensor, Tensor]:
        """:meth:`Source.quantize <foundry_fp8.backends.native.operand.Source.quantize>` of a source of this kind with unit strides along its rows.

        ``x`` is the source's, whole where ``source`` is ``None``. Its statistics go to ``piece`` (``None`` for block scales); ``known_amax`` may
        be those of ``piece``.
        """
        key = rows, columns, column_sum, known_amax is None or known_amax.data_ptr() % 16 == 0
        cast: Any = self._casts.get(key)
        if cast is None:
            cast = self._casts[key] = self._cast(
                Source(x) if source is None else source, rows, columns, column_sum
            )
        pointers = (x, *self.rest) if source is None else self.pointers(x, source)
        if piece is None:
            data, by_rows, data_t, by_columns, summed = cast(pointers)
            return (data, by_rows), (data_t, by_columns), self._nothing, summed
        stats, by_rows = piece
        data, data_t, summed = cast(pointers, stats, scale, known_amax, amax_slot)
        # Of constant scales each product gets alpha once: by x in fprop, by dy in dgrad and wgrad.
        once = self._plan.granularity == "constant" and self._operand == "x"
        by_columns = stats.select(0, 2) if once else by_rows
        return (data, by_rows), (data_t, by_columns), stats, summed

    def _cast(self, given: Source, rows: bool, columns: bool, column_sum: bool) -> Cast | BlockCast:
        plan, operand = self._plan, self._operand
        source, fmt = Producer(*given), FORMATS[plan.fmt(operand)]
        options = {"rows": rows, "columns": columns, "column_sum": column_sum}
        if plan.granularity == "tensor":
            return Cast(source, fmt, power_2=plan.power_2, **options)
        if plan.granularity == "constant":
            constant, alpha = plan.constants(operand)
            return Cast(source, fmt, power_2=False, constant=constant, alpha=alpha, **options)
        group, square = plan.blocks(operand)
        return BlockCast(source, fmt, group=group, square=square, power_2=plan.power_2, **options)


class EagerPass:
    """The passes of one kind.

    Attributes:
        plan: Their plan. Kept with what is known by its place, so that no other one comes to lie there.
        first: Of x in forward, of dy in backward.
        w: Of the weight.
    """

    __slots__ = ("_has_statistics", "_measure", "first", "plan", "w")

    def __init__(self, operand: Operand, first: Source, w: Tensor, plan: Plan) -> None:
        self.plan = plan
        self.first, self.w = Kind(operand, first, plan), Kind("w", Source(w), plan)
        assert not self.w.copies, "a weight is contiguous here"
        self._has_statistics = plan.granularity in ("tensor", "constant")
        self._measure: Measure | None = None

    def pieces(self, device: torch.device) -> tuple[Statistics | None, Statistics | None]:
        """Where the statistics of both tensors go; block scales have none."""
        if not self._has_statistics:
            return None, None
        first, w = statistics(device, 2)
        return first, w

    def measure(
        self, first: Source, piece: Statistics | None, w: Tensor, w_piece: Statistics | None
    ) -> tuple[Tensor, Tensor]:
        """Raise the first elements of both pieces to the tensors' amaxes, in one launch; the tensors have unit strides along rows.

        Returns:
            Both pieces' ``stats``.
        """
        assert piece is not None and w_piece is not None
        if self._measure is None:
            self._measure = Measure(Producer(*first), Producer(w))
        stats, w_stats = piece.stats, w_piece.stats
        pointers = self.first.pointers(first.x, first) if first.kind else (first.x, *self.first.rest)
        self._measure(pointers, stats, (w, self.w.rest[0]), w_stats)  # type: ignore[arg-type]
        return stats, w_stats


def eager_pass(
    operand: Operand,
    first: Tensor,
    source: Source | None,
    w: Tensor,
    plan: Plan,
    delayed: Delayed,
    delayed_w: Delayed,
) -> EagerPass:
    """What is known of passes like this one: of ``first`` (x or dy as ``operand`` says, ``[M, C]``, hp; ``source`` produces it unless ``None``) and
    of ``w``, ``[N, K]``, with delayed scaling's state of each as far as this pass uses it.
    """
    key: tuple[object, ...] = (
        operand, id(plan), first.shape, first.stride(), first.dtype, first.device, first.data_ptr() % 16 == 0,
        w.shape, w.stride(), w.dtype, w.data_ptr() % 16 == 0,
    )  # fmt: skip
    if source is not None:
        others = [t if t is None else (t.dtype, t.stride(), t.data_ptr() % 16 == 0) for t in source[1:7]]
        key += (source.kind, *others)
    if delayed[0] is not None or delayed_w[0] is not None:
        key += tuple([None if one is None else one.data_ptr() % 16 == 0 for one in (*delayed, *delayed_w)])
    known: EagerPass | None = _passes.get(key)
    if known is None:
        known = _passes[key] = EagerPass(operand, Source(first) if source is None else source, w, plan)
    return known
