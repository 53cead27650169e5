"""Seeing every operator that runs, and whether somebody does.

Cause: ``TorchDispatchMode`` is in ``torch.utils._python_dispatch``; torch documents it and has no public module for it. Nor has it a
public way to ask whether a mode is entered: its own code asks ``torch._C._len_torch_dispatch_stack``; nor what an operator writes to,
which its schema says (``OpOverload._schema``). Remove when it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foundry_fp8.compat.pytree import tree_iter
from foundry_fp8.config.versions import moved

try:
    from torch._C import _len_torch_dispatch_stack as watching_modes
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    raise moved(
        "no longer has torch.utils._python_dispatch.TorchDispatchMode and _len_torch_dispatch_stack as foundry_fp8 uses them "
        f"({error}), to count bytes and operators and to see who else does",
        "dispatch_mode",
    ) from error

__all__ = ["TorchDispatchMode", "watching_modes", "written"]
# ``watching_modes()``: how many modes see the operators of this thread. torch's function itself: layers ask it several times a forward.

_before = watching_modes()
with TorchDispatchMode():
    _inside = watching_modes()
if (_inside, watching_modes()) != (_before + 1, _before):
    raise moved("no longer counts the modes that are entered (_len_torch_dispatch_stack)", "dispatch_mode")


def written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """What the operator ``func`` writes to when it is called with these."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            yield from tree_iter(args[i] if i < len(args) else kwargs.get(argument.name))
