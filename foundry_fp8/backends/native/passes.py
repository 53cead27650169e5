"""What passes of a linear have in common, found once a pass: otherwise each kernel would look for its own.

A pass is a linear's forward (of x and the weight) or its backward (of dy and the weight). Two are of one kind if nothing differs on
which a launch depends: the plan, and of every tensor the shape, strides, dtype, device and whether its address is aligned. All of
that is read at every pass; what is kept for a kind are launches and sizes, never a tensor of a pass, a stream or a scale. What
compiles or is watched goes through torch's operators instead, and keeps nothing.
"""

from __future__ import annotations

from torch import Tensor

from foundry_fp8.backends.native.inputs import Delayed
from foundry_fp8.backends.native.ops import amax_of_two
from foundry_fp8.backends.native.plan import Plan
from foundry_fp8.backends.native.scaling import SCALINGS
from foundry_fp8.backends.native.scaling.base import Launch, Quantised
from foundry_fp8.backends.native.source import Amaxes, Layouts, Source
from foundry_fp8.kernels.launch import BoundedCache, as_rows, on_current_device
from foundry_fp8.kernels.tensorwise import Measure
from foundry_fp8.kernels.zeros import Statistics
from foundry_fp8.numerics.recipes import Operand

__all__ = ["OneOperand", "Pass", "pass_of"]

_passes = BoundedCache()


def _tensor(source: Source | Tensor) -> Tensor:
    return source if isinstance(source, Tensor) else source.x


def _source(source: Source | Tensor) -> Source:
    return Source(source) if isinstance(source, Tensor) else source


class _Watched:
    """One operand of passes that go through torch's operators."""

    def __init__(self, operand: Operand, plan: Plan, direct: bool) -> None:
        self._operand, self._plan, self._direct = operand, plan, direct

    def quantize(
        self, source: Source | Tensor, piece: Statistics | None, layouts: Layouts, amaxes: Amaxes
    ) -> Quantised:
        """See :meth:`_Kept.quantize`."""
        scaling, given = SCALINGS[self._plan.kind], _source(source)
        return scaling.quantize(given, self._operand, self._plan, layouts, amaxes, direct=self._direct)


class WatchedPass:
    """A pass that compiles or is watched, runs beside the current device, or has no kernels to keep; as :class:`EagerPass`."""

    copies = False
    """Operators copy what they cannot read."""
    has_statistics = False
    """They make their own."""

    def __init__(self, operand: Operand, plan: Plan, direct: bool) -> None:
        self._direct = direct
        self.first, self.w = _Watched(operand, plan, direct), _Watched("w", plan, direct)

    def measure(
        self, first: Source | Tensor, piece: Statistics | None, w: Tensor, w_piece: Statistics | None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`EagerPass.measure`."""
        run = amax_of_two.direct if self._direct else amax_of_two
        found: tuple[Tensor, Tensor] = run(*_source(first), w)
        return found


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

    def quantize(
        self, source: Source | Tensor, piece: Statistics | None, layouts: Layouts, amaxes: Amaxes
    ) -> Quantised:
        """:meth:`NativeScaling.quantize <foundry_fp8.backends.native.scaling.NativeScaling.quantize>` of one of them with unit
        strides along its rows, by a launch that is kept; statistics go to ``piece``.
        """
        key = layouts, amaxes[1] is None or amaxes[1].data_ptr() % 16 == 0
        launch = self._launches.get(key)
        if launch is None:
            launch = SCALINGS[self._plan.kind].launch(_source(source), self._operand, self._plan, layouts)
            self._launches[key] = launch
        pointers = (source, *self.rest) if type(source) is not Source else self.pointers(source)
        return launch(pointers, piece, amaxes)


class EagerPass:
    """The passes of one kind.

    Attributes:
        plan: Their plan. Kept with what is known by its place, so that no other one comes to lie there.
        first: Of x in forward, of dy in backward.
        w: Of the weight.
        has_statistics: Whether both tensors' statistics have to be given places (block scales have none).
        copies: Whether the first tensor has to be copied, so that it has unit strides along its rows.
    """

    __slots__ = ("_measure", "copies", "first", "has_statistics", "plan", "w")

    def __init__(self, operand: Operand, first: Source | Tensor, w: Tensor, plan: Plan) -> None:
        self.plan, self.copies = plan, as_rows(_tensor(first)) is not _tensor(first)
        self.first, self.w = _Kept(operand, first, plan), _Kept("w", w, plan)
        assert as_rows(w) is w, "a weight is contiguous here"
        self.has_statistics = SCALINGS[plan.kind].has_statistics
        self._measure: Measure | None = None

    def measure(
        self, first: Source | Tensor, piece: Statistics | None, w: Tensor, w_piece: Statistics | None
    ) -> tuple[Tensor, Tensor]:
        """The amaxes of both, each the first of three float32 elements (of both pieces), in one launch; both have unit strides along rows."""
        assert piece is not None and w_piece is not None
        if self._measure is None:
            self._measure = Measure(_source(first), Source(w))
        stats, w_stats = piece.stats, w_piece.stats
        self._measure(self.first.pointers(first), stats, (w, self.w.rest[0]), w_stats)  # type: ignore[arg-type]
        return stats, w_stats


OneOperand = _Kept | _Watched
Pass = EagerPass | WatchedPass


def pass_of(
    operand: Operand,
    x: Tensor,
    first: Source | Tensor,
    w: Tensor,
    plan: Plan,
    delayed: Delayed,
    delayed_w: Delayed,
    *,
    direct: bool,
) -> Pass:
    """What is known of passes like this one.

    Args:
        operand: What the first tensor is, x or dy.
        x: That tensor, ``[M, C]``, hp, or that of its source.
        first: The same, or its source.
        w: ``[N, K]``, hp.
        plan: The recipe.
        delayed: Delayed scaling's state of ``first``, as far as this pass uses it.
        delayed_w: The same of the weight.
        direct: Whether nobody watches (:func:`~foundry_fp8.backends.native.ops.unnoticed`).
    """
    if not (direct and SCALINGS[plan.kind].has_kernels and on_current_device(x)):
        return WatchedPass(operand, plan, direct)
    key: tuple[object, ...] = (
        operand, id(plan), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0,
        w.shape, w.stride(), w.dtype, w.data_ptr() % 16 == 0,
    )  # fmt: skip
    if type(first) is Source:
        others = [t if t is None else (t.dtype, t.stride(), t.data_ptr() % 16 == 0) for t in first[1:6]]
        key += (first.kind, *others)
    if delayed[0] is not None or delayed_w[0] is not None:
        key += tuple([None if one is None else one.data_ptr() % 16 == 0 for one in (*delayed, *delayed_w)])
    known: EagerPass | None = _passes.get(key)
    if known is None:
        known = _passes[key] = EagerPass(operand, first, w, plan)
    return known
