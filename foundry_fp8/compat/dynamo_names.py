"""Names of its own for what an ``autograd.Function`` saves, in a graph of Dynamo.

Cause: in torch 2.7 an input of the backward's graph has the name of the forward's node as its parameter. Where a local variable of the backward took
that name first, the node gets the next free one, and torch.fx writes ``name = parameter`` for one input after the other: with
parameters ``part, part_1`` and nodes ``part_1, part_2``, the second input reads the first. Gradients are wrong without a word
(``tests/compat/test_dynamo_names.py`` is such a case; torch 2.11 gets it right). Remove when torch 2.7 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["renamed_for_dynamo"]


def renamed_for_dynamo(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """What to hand to ``save_for_backward``: ``tensors``, as nodes that no local variable of a backward is named after."""
    if not torch.compiler.is_compiling():
        return list(tensors)
    found: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is None:
            found.append(None)
        else:
            # Dynamo names a node after the first local that holds it.
            foundry_fp8_saved = tensor.view(tensor.shape)
            found.append(foundry_fp8_saved)
    return found
