"""What passes of a linear have in common, found once a pass: otherwise each kernel would look for its own.

A pass is a linear's forward (of x and the weight) or its backward (of dy and the weight). Two are of one kind if nothing differs on
which a launch depends: the plan, and of every tensor the shape, strides, dtype, device and whether its address is aligned. All of
that is read at every pass; what is kept for a kind are launches and sizes, never a tensor of a pass, a stream or a scale. What
compiles or is watched goes through torch's operators instead, and keeps nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from foundry_fp8.backends.native.inputs import Delayed
from foundry_fp8.backends.native.plan import Plan
from foundry_fp8.backends.native.scaling import SCALINGS
from foundry_fp8.backends.native.scaling.base import Launch, Quantised
from foundry_fp8.backends.native.source import Amaxes, Layouts, Source
from foundry_fp8.kernels.launch import BoundedCache, as_rows, on_current_device
from foundry_fp8.kernels.tensorwise import Measure
from foundry_fp8.kernels.zeros import Statistics
from foundry_fp8.numerics.recipes import Operand

__all__ = ["Job", "Pass", "pass_of"]

_passes = BoundedCache()


def _tensor(source: Source | Tensor) -> Tensor:
    return source if isinstance(source, Tensor) else source.x


def _source(source: Source | Tensor) -> Source:
    return Source(source) if isinstance(source, Tensor) else source


class WatchedPass:
    """A pass that compiles or is watched, runs beside the current device, or has no kernels to keep; as :class:`EagerPass`."""

    copies = False
    """Operators copy what they cannot read."""
    has_statistics = False
    """They make their own."""

    def __init__(self, operand: Operand, plan: Plan, direct: bool) -> None:
        self._operand, self._plan, self._direct = operand, plan, direct

    def quantize(self, jobs: Sequence[Job]) -> list[Quantised]:
        """See :meth:`EagerPass.quantize`."""
        made = []
        for place, source, _, layouts, amaxes in jobs:
            operand: Operand = "w" if place else self._operand
            run = SCALINGS[self._plan.kind].quantize
            made.append(run(_source(source), operand, self._plan, layouts, amaxes, direct=self._direct))
        return made


class _Kept:
    """The tensors of one kind that are one operand under one plan, as :class:`EagerPass` distinguishes kinds."""

    __slots__ = ("_launches", "_operand", "_plan", "rest")

    def __init__(self, operand: Operand, source: Source | Tensor, plan: Plan) -> None:
        self._operand, self._plan = operand, plan
        self._launches: dict[tuple[object, ...], Launch] = {}
        self.rest = _source(source).checked().pointers[1:]

    def pointers(self, source: Source | Tensor) -> tuple[object, ...]:
        """What kernels take of one of them."""
        if type(source) is not Source:
            return source, *self.rest
        x, up, mean, rstd, weight, bias, _ = source
        return x, self.rest[0], up, self.rest[2], mean, rstd, weight, bias

    def launch(self, source: Source | Tensor, layouts: Layouts, amaxes: Amaxes) -> Launch:
        """What quantises such ones, kept."""
        key = layouts, amaxes[1] is None or amaxes[1].data_ptr() % 16 == 0
        launch = self._launches.get(key)
        if launch is None:
            launch = SCALINGS[self._plan.kind].launch(_source(source), self._operand, self._plan, layouts)
            self._launches[key] = launch
        return launch

    def quantize(
        self, source: Source | Tensor, piece: Statistics | None, layouts: Layouts, amaxes: Amaxes
    ) -> Quantised:
        """:meth:`NativeScaling.quantize <foundry_fp8.backends.native.scaling.NativeScaling.quantize>` of one of them with unit
        strides along its rows; statistics go to ``piece``.
        """
        return self.launch(source, layouts, amaxes)(self.pointers(source), piece, amaxes)


class EagerPass:
    """The passes of one kind.

    Attributes:
        plan: Their plan. Kept with what is known by its place, so that no other one comes to lie there.
        has_statistics: Whether each tensor's statistics have to be given a place (block scales have none).
        copies: Whether the first tensor has to be copied, so that it has unit strides along its rows.
    """

    __slots__ = ("_joins", "_kept", "_together", "copies", "has_statistics", "plan")

    def __init__(
        self, operand: Operand, first: Source | Tensor, weights: Sequence[Tensor], plan: Plan
    ) -> None:
        self.plan, self.copies = plan, as_rows(_tensor(first)) is not _tensor(first)
        self._kept = [_Kept(operand, first, plan), *(_Kept("w", w, plan) for w in weights)]
        assert all(as_rows(w) is w for w in weights), "a weight is contiguous here"
        self.has_statistics, self._joins = SCALINGS[plan.kind].has_statistics, SCALINGS[plan.kind].joins
        self._together: dict[tuple[object, ...], _Together] = {}

    def quantize(self, jobs: Sequence[Job]) -> list[Quantised]:
        """Quantise operands of this pass, the first before weights; in one launch, and measured in one, where the scaling can."""
        kept = self._kept
        if len(jobs) == 1 or not self._joins:
            return [
                kept[place].quantize(source, piece, layouts, amaxes)
                for place, source, piece, layouts, amaxes in jobs
            ]
        key: list[object] = []
        for place, _, _, layouts, (_, amax, _) in jobs:
            key += place, layouts, amax is None, amax is None or amax.data_ptr() % 16 == 0
        kind = tuple(key)
        known = self._together.get(kind)
        if known is None:
            known = self._together[kind] = _Together(kept, jobs, self.plan)
        return known(jobs)


class _Together:
    """Jobs of one kind in one launch, and those that have to be measured in one before it."""

    __slots__ = ("_kept", "_launch", "_measure", "_unmeasured")

    def __init__(self, kept: Sequence[_Kept], jobs: Sequence[Job], plan: Plan) -> None:
        scaling, self._kept = SCALINGS[plan.kind], kept
        self._unmeasured = [
            scaling.follows_amax and scale is None and amax is None for *_, (scale, amax, _) in jobs
        ]
        wanted = list(itertools.compress([_source(job[1]) for job in jobs], self._unmeasured))
        self._measure = Measure(*wanted) if wanted else None
        launches = [kept[place].launch(source, layouts, amaxes) for place, source, _, layouts, amaxes in jobs]
        self._launch = scaling.launch_together(launches)

    def __call__(self, jobs: Sequence[Job]) -> list[Quantised]:
        given = []
        for (place, source, piece, _, amaxes), measures in zip(jobs, self._unmeasured, strict=True):
            pointers, stats = self._kept[place].pointers(source), piece.stats
            given.append((pointers, stats, *((None, stats, amaxes[2]) if measures else amaxes)))
        if self._measure is not None:
            self._measure(*itertools.compress([one[:2] for one in given], self._unmeasured))
        return self._launch(given, [job[2] for job in jobs])


Pass = EagerPass | WatchedPass
Job = tuple[int, Source | Tensor, Any, Layouts, Amaxes]
"""What a pass quantises: 0 for its first operand, 1 and so on for weights; what it is made from; the piece for its statistics, if it has
them. A plain tuple, as Dynamo traces it."""


def pass_of(
    operand: Operand,
    x: Tensor,
    first: Source | Tensor,
    weights: Sequence[Tensor],
    plan: Plan,
    delayed: Sequence[Delayed],
    *,
    direct: bool,
) -> Pass:
    """What is known of passes like this one.

    Args:
        operand: What the first tensor is, x or dy.
        x: That tensor, ``[M, C]``, hp, or that of its source.
        first: The same, or its source.
        weights: ``[N, K]`` each, hp.
        plan: The recipe.
        delayed: Delayed scaling's state of ``first`` and of each weight, as far as this pass uses it.
        direct: Whether nobody watches (:func:`~foundry_fp8.backends.native.ops.unnoticed`).
    """
    if not (direct and SCALINGS[plan.kind].has_kernels and on_current_device(x)):
        return WatchedPass(operand, plan, direct)
    kind: tuple[object, ...] = (
        operand, id(plan), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0,
    )  # fmt: skip
    for w in weights:
        kind += w.shape, w.stride(), w.dtype, w.data_ptr() % 16 == 0
    if type(first) is Source:
        kind += (
            first.kind,
            *[t if t is None else (t.dtype, t.stride(), t.data_ptr() % 16 == 0) for t in first[1:6]],
        )
    if delayed[0][0] is not None or delayed[0][1] is not None:
        kind += tuple([None if t is None else t.data_ptr() % 16 == 0 for state in delayed for t in state])
    known: EagerPass | None = _passes.get(kind)
    if known is None:
        known = _passes[kind] = EagerPass(operand, first, weights, plan)
    return known
