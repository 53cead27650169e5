"""Selective activation checkpointing: contexts that keep what the policy saves as it was, and what a recompute takes from them.

Cause: torch keeps the results that the policy saves in a private dispatch mode
(``torch.utils.checkpoint._CachingTorchDispatchMode.storage``; until torch 2.12 a list of results by operator, which a recompute
pops; since torch 2.13 a dict by operator and call, with markers in place of what was recomputed or taken) and takes nothing for it
that is written to afterwards. A model that adds its mask or position bias to the scores in place (T5) then gets wrong gradients:
torch checks versions, but ``torch.matmul`` returns its product through ``_unsafe_view``, which has a version of its own. Where
versions do show it, torch raises. And it has no public way to ask what a recompute re-runs: a module's forward runs again, but the
operators that the policy saved do not. Remove when torch copies what is written to, and can be asked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from foundry_fp8.compat.dispatch_mode import watching_modes, written
from foundry_fp8.compat.pytree import tree_iter
from foundry_fp8.compat.storages import storage_number
from foundry_fp8.config.versions import moved

__all__ = [
    "KEPT_PAST_HOOKS",
    "cached_results",
    "check_selective_checkpoint",
    "selective_checkpoint_runs",
    "selective_contexts",
]

_CACHED: Any = getattr(torch.utils.checkpoint, "_CachedTorchDispatchMode", None)
_CACHING: Any = getattr(torch.utils.checkpoint, "_CachingTorchDispatchMode", None)


_MOVED = moved(
    "keeps what selective checkpointing saves otherwise than foundry_fp8 knows (torch.utils.checkpoint._CachingTorchDispatchMode, "
    "_CachedTorchDispatchMode). By them it keeps such results from being written to, and knows what a recompute runs again",
    "selective_checkpoint",
)
if _CACHED is None or _CACHING is None:
    raise _MOVED


KEPT_PAST_HOOKS = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)
"""For ``checkpoint``: what is kept does not go through the hooks around it. Until torch 2.13 that is so; since 2.14 torch asks."""


def check_selective_checkpoint() -> None:
    """Raise unless torch keeps results as described above. Not while anything traces."""
    if not _works():
        raise _MOVED


def selective_contexts(operators: Sequence[Any]) -> tuple[Any, Any]:
    """The ``create_selective_checkpoint_contexts`` of torch; what ``operators`` returned is copied before something writes to it."""
    caching, cached = create_selective_checkpoint_contexts(list(operators))
    caching.__class__ = _CopyOnWrite
    return caching, cached


@functools.cache
def _works() -> bool:
    """Whether a saved product that is written to is taken unchanged by the recompute, and seen to be taken: tried on 1 x 1 matrices."""
    taken = []

    def region(x: Tensor) -> Tensor:
        before = cached_results(("aten.mm",))
        product = torch.mm(x, x)
        taken.append(before - cached_results(("aten.mm",)))
        return product.add_(1).sin()

    context_fn = functools.partial(selective_contexts, [torch.ops.aten.mm.default])
    # Outside of the modes of whoever calls first, a plan's fake tensors for one.
    with _disable_current_modes(), torch.enable_grad():
        x = torch.full((1, 1), 3.0, dtype=torch.float64, device="cpu", requires_grad=True)
        try:
            checkpoint(region, x, use_reentrant=False, context_fn=context_fn).backward()
        except (AttributeError, TypeError, RuntimeError):
            return False
        # d/dx sin(x^2 + 1)
        return taken == [0, 1] and x.grad is not None and torch.allclose(x.grad, 2 * x * torch.cos(x * x + 1))


class _CopyOnWrite(_CACHING):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            changed = filter(_plain, written(func, args, kwargs or {}))
            storages = {storage_number(x.untyped_storage()) for x in changed}
            for kept in (kept for _, returned in _calls(self.storage) for kept in returned):
                x = kept.val
                if _plain(x) and storage_number(x.untyped_storage()) in storages:
                    kept.val = x.clone()
                    kept.version = kept.val._version
        return super().__torch_dispatch__(func, types, args, kwargs)


def _calls(storage: Any) -> Iterator[tuple[Any, list[Any]]]:
    """``(operator, torch's wrappers around what it returned)`` of each call whose result is kept, and not taken yet."""
    for operator, results in storage.items():
        for returned in list(results.values()) if isinstance(results, dict) else results:
            wrappers = [kept for kept in tree_iter(returned) if hasattr(kept, "val")]
            if wrappers:
                yield operator, wrappers


def _plain(x: Any) -> bool:
    """Whether ``x`` is a tensor with a storage of its own."""
    return isinstance(x, Tensor) and not hasattr(x, "__tensor_flatten__")


def cached_results(operators: tuple[str, ...]) -> int:
    """Results still in the caches that are active, of operators named in ``operators``, such as ``aten.mm``.

    Fewer after a module's forward than before it: the module took that operator's result from the cache. 0 where no
    selective checkpointing runs.
    """
    return sum(
        str(getattr(operator, "overloadpacket", None)) in operators  # a compiled region has none
        for mode in _get_current_dispatch_mode_stack()
        if isinstance(mode, _CACHED)
        for operator, _ in _calls(mode.storage)
    )


def selective_checkpoint_runs() -> bool:
    """Whether a forward runs under selective checkpointing, for the first time or again."""
    return watching_modes() > 0 and any(
        isinstance(mode, (_CACHED, _CACHING)) for mode in _get_current_dispatch_mode_stack()
    )
