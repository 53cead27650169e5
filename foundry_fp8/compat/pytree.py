"""Tensors inside nested arguments and results.

Cause: torch's tree functions are in ``torch.utils._pytree``; ``torch.utils.pytree`` came after 2.7 and holds other names. Remove
when every supported torch has a public module with these.
"""

from __future__ import annotations

from foundry_fp8.config.versions import moved

try:
    from torch.utils._pytree import register_pytree_node, tree_flatten, tree_iter, tree_map, tree_unflatten
except ImportError as error:
    raise moved(f"no longer has torch.utils._pytree as foundry_fp8 uses it ({error})", "pytree") from error

__all__ = ["register_pytree_node", "tree_flatten", "tree_iter", "tree_map", "tree_unflatten"]
