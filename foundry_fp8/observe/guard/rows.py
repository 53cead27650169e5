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
    parts = batch if isinstance(batch, Mapping | list | tuple) else [batch]
    leaves = list(parts.values() if isinstance(parts, Mapping) else parts)
    size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if size is None:
        raise TypeError(
            f"a batch of type {type(batch).__name__} holds no tensor that could be cut to {rows} rows"
        )
    of_rows = [leaf.dim() > 0 if isinstance(leaf, Tensor) else isinstance(leaf, list) for leaf in leaves]
    cut = [x[:rows] if rowwise and len(x) == size else x for x, rowwise in zip(leaves, of_rows, strict=True)]
    if isinstance(batch, Mapping):
        return dict(zip(batch, cut, strict=True))
    return type(batch)(cut) if isinstance(batch, list | tuple) else cut[0]
