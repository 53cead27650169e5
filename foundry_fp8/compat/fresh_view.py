"""Reshaping the result of a custom autograd function as ``nn.Linear`` reshapes its own.

Cause: ``Tensor.view`` of a result makes a view for autograd, and a tensor hook on a view is lost when somebody changes it in
place (``mlp_output += attention_output`` in transformers' Falcon), so that backward GEMMs went uncounted. Torch's own
matmul reshapes by ``aten::_unsafe_view``, which autograd does not take for a view; it has no public name. Remove this when
there is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fresh_view", "in_shape"]

_unsafe_view = torch.ops.aten._unsafe_view.default


def fresh_view(result: Tensor, *shape: int) -> Tensor:
    """``result`` in another shape, no view of it for autograd; nobody else may hold ``result``."""
    return _unsafe_view(result, shape)


def in_shape(result: Tensor, *shape: int) -> Tensor:
    """The same of a result that autograd does not record yet, at a quarter of the host's time where it has memory of its own."""
    return fresh_view(result, *shape) if result._is_view() else result.resize_(shape)
