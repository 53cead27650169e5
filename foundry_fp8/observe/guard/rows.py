"""A part of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["first_rows"]


def first_rows(batch: Any, rows: int) -> Any:
    """The first ``rows`` sequences of a batch: a tensor, or a mapping or sequence of tensors with one leading dimension.

    Raises:
        TypeError: It holds no tensor.
    """
    leaves = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, list | tuple)
        else [batch]
    )
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes:
        raise TypeError(
            f"a batch of type {type(batch).__name__} holds no tensor that could be cut to {rows} rows"
        )

    def cut(leaf: Any) -> Any:
        of_rows = leaf.dim() > 0 if isinstance(leaf, Tensor) else isinstance(leaf, list)
        return leaf[:rows] if of_rows and len(leaf) == sizes[0] else leaf

    if isinstance(batch, Mapping):
        return {key: cut(value) for key, value in batch.items()}
    return type(batch)(map(cut, batch)) if isinstance(batch, list | tuple) else cut(batch)
