"""Selective activation checkpointing: contexts that keep what the policy saves as it was, and what a recompute takes from them.

Cause: torch keeps the results that the policy saves in a private dispatch mode
(``torch.utils.checkpoint._CachingTorchDispatchMode.storage``, torch 2.7 to 2.11) and takes nothing for it that is written to
afterwards. A model that adds its mask or position bias to the scores in place (T5) then gets wrong gradients: torch checks
versions, but ``torch.matmul`` returns its product through ``_unsafe_view``, which has a version of its own. Where versions do
show it, torch raises. And it has no public way to ask what a recompute re-runs: a module's forward runs again, but the operators
that the policy saved do not. Remove when torch copies what is written to, and can be asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from foundry_fp8.compat.dispatch_mode import watching_modes
from foundry_fp8.compat.pytree import tree_iter
from foundry_fp8.compat.storages import storage_number

__all__ = ["cached_results", "selective_checkpoint_runs", "selective_contexts"]

_CACHED: Any = getattr(torch.utils.checkpoint, "_CachedTorchDispatchMode", None)
_CACHING: Any = getattr(torch.utils.checkpoint, "_CachingTorchDispatchMode", None)


def _changed() -> bool:
    """Whether torch's contexts are not as described above."""
    if _CACHED is None or _CACHING is None:
        return True
    caching, cached = create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
    if type(caching) is not _CACHING or getattr(caching, "storage", 0) is not getattr(cached, "storage", 1):
        return True
    x = torch.zeros(1, 1)
    with caching:
        torch.mm(x, x)
    kept = caching.storage.get(torch.ops.aten.mm.default) or [None]
    return not hasattr(caching, "policy_fn") or not {"val", "version"} <= vars(kept[0] or object()).keys()


if _changed():
    raise RuntimeError(
        f"torch {torch.__version__} no longer has torch.utils.checkpoint._CachingTorchDispatchMode and _CachedTorchDispatchMode, "
        "or they keep results otherwise. By them foundry_fp8 keeps what selective checkpointing saves from being written to, and "
        "knows what it re-runs. Install a torch from 2.7 to 2.11, or adapt foundry_fp8/compat/selective_checkpoint.py."
    )


def selective_contexts(operators: Sequence[Any]) -> tuple[Any, Any]:
    """The ``create_selective_checkpoint_contexts`` of torch; what ``operators`` returned is copied before something writes to it."""
    caching, cached = create_selective_checkpoint_contexts(list(operators))
    return _CopyOnWrite(caching.policy_fn, caching.storage), cached


class _CopyOnWrite(_CACHING):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            written = {
                storage_number(x.untyped_storage()) for x in _written(func._schema, args, kwargs or {})
            }
            for kept in tree_iter(list(self.storage.values())):
                x = kept.val
                if _plain(x) and storage_number(x.untyped_storage()) in written:
                    kept.val = x.clone()
                    kept.version = kept.val._version
        return super().__torch_dispatch__(func, types, args, kwargs)


def _written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator called with ``args`` and ``kwargs`` writes to."""
    for index, argument in enumerate(schema.arguments):
        if argument.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_iter(given) if _plain(x))


def _plain(x: Any) -> bool:
    """Whether ``x`` is a tensor with a storage of its own."""
    return isinstance(x, Tensor) and not hasattr(x, "__tensor_flatten__")


def cached_results(operators: tuple[str, ...]) -> int:
    """Results still in the caches that are active, of ``aten`` operators whose name starts with one of ``operators``.

    Fewer after a module's forward than before it: the module took that operator's result from the cache. 0 where no
    selective checkpointing runs.
    """
    return sum(
        len(results)
        for mode in _get_current_dispatch_mode_stack()
        if isinstance(mode, _CACHED)
        for operator, results in mode.storage.items()
        if operator.__name__.startswith(operators)
    )


def selective_checkpoint_runs() -> bool:
    """Whether a forward runs under selective checkpointing, for the first time or again."""
    return watching_modes() > 0 and any(
        isinstance(mode, (_CACHED, _CACHING)) for mode in _get_current_dispatch_mode_stack()
    )
