"""Which nodes of the autograd graph may read back rounded what they saved, and which node it is that saves a tensor.

Rounding moves a tensor by a fraction of the largest element of its block. That is harmless where a gradient is the saved
tensor times something (matmuls, products) or a function of it whose slope is bounded (smooth activations, attention). It is
not where backward asks for a sign or compares with a bound (what is related to relu, clamp, abs, maximum: 8 to 40 % wrong),
nor where it divides or takes a root or a logarithm (up to NaN). So this file lists what is known, and the rest stays exact.

A pack hook gets the tensor and not the node. But autograd numbers its nodes as it makes them, an operator's just before
it saves anything, and a node is reached through ``grad_fn`` as soon as something is saved that came after it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from foundry_fp8.compat.autograd import newest_node, node_number
from foundry_fp8.compat.autograd_nodes import added_to_scores, exponent_of, function_of
from foundry_fp8.compat.storages import storage_number

__all__ = ["Reader", "Reads", "Region", "reads_of"]

Saved = TypeVar("Saved")


class Reads(enum.Enum):
    """What a node's backward makes of what it saved."""

    SMOOTHLY = enum.auto()
    """It may be rounded."""
    SIGN = enum.auto()
    """It may be rounded as long as what is positive stays positive."""
    ATTENTION = enum.auto()
    """It may be rounded, except for the log-sum-exp (float32 of at most three dimensions, where what is attended to has four
    or is half as wide) and for what is added to the scores (:attr:`Reader.mask`)."""
    EXACTLY = enum.auto()
    """It must not be rounded."""


_PRODUCTS = (
    "Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Dot", "Linear", "GroupedMm", "Convolution", "Mul", "Addcmul",
)  # fmt: skip
_SMOOTH = (
    "Silu", "Gelu", "Mish", "Glu", "Sigmoid", "Tanh", "Softplus", "Exp", "Expm1", "Softmax", "SafeSoftmax",
    "NativeLayerNorm", "FusedRmsNorm",
)  # fmt: skip
_ATTENTION = (
    "ScaledDotProductFlashAttention", "ScaledDotProductFlashAttentionForCpu", "ScaledDotProductEfficientAttention",
    "ScaledDotProductCudnnAttention", "ScaledDotProductFusedAttentionOverrideable", "FlashAttention", "EfficientAttention",
)  # fmt: skip
_FLASH_ATTENTION = tuple(
    f"{v}{packed}Func" for v in ("", "Varlen") for packed in ("", "KVPacked", "QKVPacked")
)

_KNOWN = {
    # The first overload of an operator is that of tensors.
    **{f"{name}Backward0": Reads.SMOOTHLY for name in (*_PRODUCTS, *_SMOOTH)},
    **{f"{name}Backward0": Reads.ATTENTION for name in _ATTENTION},
    **{f"flash_attn.flash_attn_interface.FlashAttn{name}": Reads.ATTENTION for name in _FLASH_ATTENTION},
    "ReluBackward0": Reads.SIGN,
}
"""torch's nodes by their names, other autograd functions by module and name."""


def reads_of(node: Any) -> Reads:
    """What ``node`` makes of what it saved. An autograd function of this package may say so: ``ctx.reads_smoothly = True``."""
    function = function_of(node)
    if function is not None:
        known = _KNOWN.get(f"{function.__module__}.{function.__qualname__}", Reads.EXACTLY)
        return Reads.SMOOTHLY if getattr(node, "reads_smoothly", False) else known
    # Squares, cubes: the slope grows no faster than the values, as far as these go.
    if node.name() == "PowBackward0":
        return Reads.SMOOTHLY if 2 <= exponent_of(node) <= 4 else Reads.EXACTLY
    return _KNOWN.get(node.name(), Reads.EXACTLY)


class Reader(NamedTuple):
    """A node, as far as it matters for what it saved.

    Attributes:
        reads: What it makes of it.
        name: torch's name of it.
        mask: The number of the storage that holds what an attention adds to its scores, a mask or a bias. Its largest
            elements are the most negative numbers there are: rounding passes what a dtype can hold, and in the blocks that
            share their scale all others are lost, where backward adds them to scores of order 1 again.
    """

    reads: Reads
    name: str
    mask: int | None = None

    @classmethod
    def of(cls, node: Any, *, saved_here: bool) -> Reader:
        """What is known of ``node``. To read what it saved, where that lies in a checkpoint, would run the checkpoint again."""
        reads, mask = reads_of(node), None
        if reads is Reads.ATTENTION and saved_here:
            added = added_to_scores(node)
            mask = None if added is None else storage_number(added.untyped_storage())
        return cls(reads, node.name(), mask)


class Region(Generic[Saved]):
    """What is saved while a module runs, until it is found out by which node.

    Args:
        settle: Called with what was saved and by whom. Where no node is found (in-place operators on views, functions that make a
            graph of their own) that one reads ``EXACTLY``.
    """

    def __init__(self, settle: Callable[[Saved, Reader], None]) -> None:
        self._settle = settle
        self._first = newest_node()
        self._found: dict[int, Reader] = {}
        self._waiting: dict[int, list[Saved]] = {}

    def wait(self, saved: Saved, number: int) -> None:
        """Settle ``saved`` when the node is found that was the newest, ``number``, when it was saved."""
        if number in self._found:
            self._settle(saved, self._found[number])
        else:
            self._waiting.setdefault(number, []).append(saved)

    def resolve(self, node: Any) -> None:
        """Settle what nodes saved that lead to ``node``, as far as they are of this region."""
        newest = newest_node()  # leaves have no number of their own: theirs is larger
        nodes = [node] if self._waiting else []
        ready: list[tuple[Saved, Reader]] = []
        while nodes:
            node = nodes.pop()
            if node is None:
                continue
            number = node_number(node)
            if not self._first < number <= newest or number in self._found:
                continue
            waiting = self._waiting.pop(number, [])
            found = self._found[number] = Reader.of(node, saved_here=bool(waiting))
            ready += [(saved, found) for saved in waiting]
            nodes += [before for before, _ in node.next_functions]
        # What some node needs as it is, is not kept rounded for others.
        for saved, reader in sorted(ready, key=lambda item: item[1].reads is not Reads.EXACTLY):
            self._settle(saved, reader)

    def close(self, nodes: Iterable[Any]) -> None:
        """The module has returned outputs of ``nodes``: settle everything."""
        for node in nodes:
            self.resolve(node)
        for waiting in self._waiting.values():
            for saved in waiting:
                self._settle(saved, Reader(Reads.EXACTLY, "an unknown node"))
        self._waiting.clear()
