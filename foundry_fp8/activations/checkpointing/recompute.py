"""One checkpointed call: what it keeps of its inputs, whether they come by position or by keyword, and where."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from foundry_fp8.activations.checkpointing.policy import Policy, context_fn_for
from foundry_fp8.compat.pytree import tree_flatten, tree_unflatten

__all__ = ["recomputed"]


def recomputed(function: Callable[..., Any], *args: Any, policy: Policy, offload: bool, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, run again in backward.

    :func:`torch.utils.checkpoint.checkpoint` hands positional tensors to the saved-tensor hooks around it, those of
    offloading and packing, and holds what comes by keyword itself. Hugging Face calls attention with its hidden states by
    keyword. So the tensors that need gradients, the activations, go by position; masks and position tables, which all
    blocks share, stay where they are.
    """
    context_fn = context_fn_for(policy)
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    if torch.compiler.is_compiling():  # no hooks act there
        return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    leaves, structure = tree_flatten((args, kwargs), is_leaf=_is_leaf)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    activations = [leaves[i] for i in places]
    for i in places:
        leaves[i] = None

    def run(*inputs: Tensor) -> Any:
        filled = list(leaves)
        for i, x in zip(places, inputs, strict=True):
            filled[i] = x
        own_args, own_kwargs = tree_unflatten(filled, structure)
        return function(*own_args, **own_kwargs)

    # Hooks outside the checkpoint see its inputs alone; what is saved inside it is the checkpoint's.
    with save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else contextlib.nullcontext():
        return checkpoint(run, *activations, use_reentrant=False, **options)


def _is_leaf(x: Any) -> bool:
    """Everything but plain containers: a cache of keys that is taken apart would be put together as another one."""
    return type(x) not in (tuple, list, dict)
