"""One call of a checkpointed module: recomputed in backward, its inputs kept as they are, packed or in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foundry_fp8.activations.checkpointing.policy import Policy, context_fn_for
from foundry_fp8.activations.offload.store import host_store
from foundry_fp8.compat.pytree import tree_flatten, tree_iter, tree_unflatten
from foundry_fp8.compat.selective_checkpoint import KEPT_PAST_HOOKS

__all__ = ["recomputed"]


def recomputed(function: Callable[..., Any], *args: Any, policy: Policy, offload: bool, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, recomputed in backward; under policy ``offload`` not recomputed but saved in host memory.

    :func:`torch.utils.checkpoint.checkpoint` saves positional tensors through the hooks around it (offloading, packing) and
    holds keyword arguments itself, by which Hugging Face passes hidden states. So tensors that need gradients (the
    activations) are passed by position. Masks and position tables, which all blocks share, are neither moved nor packed.
    """
    if offload or policy == "offload":
        return _offloaded(function, args, kwargs, policy)
    if torch.compiler.is_compiling():  # saved-tensor hooks have no effect in a compiled graph
        return checkpoint(function, *args, use_reentrant=False, **_options(policy), **kwargs)
    run, activations = _by_position(function, args, kwargs)
    return checkpoint(run, *activations, use_reentrant=False, **_options(policy))


# torch.compile cannot trace saved-tensor hooks; it compiles the module inside them as a graph of its own.
@torch.compiler.disable(recursive=False)
def _offloaded(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy
) -> Any:
    if policy == "offload":  # nothing is recomputed
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        # The device is that of the activations; a table of positions or lengths may be on the CPU.
        first = next((x for x in tensors if x.requires_grad), next(iter(tensors), None))
        with contextlib.nullcontext() if first is None else host_store(first.device).unit():
            return function(*args, **kwargs)
    run, activations = _by_position(function, args, kwargs)
    # Hooks outside the checkpoint see its inputs alone; what is saved inside it is the checkpoint's.
    with host_store(activations[0].device).unit() if activations else contextlib.nullcontext():
        return checkpoint(run, *activations, use_reentrant=False, **_options(policy))


def _options(policy: Policy) -> dict[str, Any]:
    context_fn = context_fn_for(policy)
    if context_fn is None:
        return {}
    # What a policy keeps is not what hooks around the checkpoint pack or move.
    past_hooks = {} if torch.compiler.is_compiling() else KEPT_PAST_HOOKS
    return {"context_fn": context_fn, **past_hooks}


def _by_position(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """``function`` as a function of only the tensors that need gradients, and these tensors."""
    # Other containers, such as a key-value cache, must be passed as the same object.
    leaves, structure = tree_flatten((args, kwargs), is_leaf=lambda x: type(x) not in (tuple, list, dict))
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

    return run, activations
