"""Whether a model is compiled, whoever compiled it.

Cause: torch has no public way to ask. ``torch.compile(model)`` wraps it, ``model.compile()`` leaves a mark on it, and Composer's
``compile_config`` keeps the module and puts the wrapper's compiled function in place of its ``forward``, where dynamo's own mark shows it
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/_dynamo/eval_frame.py, ``_torchdynamo_orig_callable``). Remove when torch has one.
"""

from __future__ import annotations

from torch import nn

__all__ = ["is_compiled"]


def is_compiled(model: nn.Module) -> bool:
    """Whether ``model`` or a module of it runs as a graph, which leaves out hooks that come later and the ledgers of FP8 layers."""
    return any(
        "_orig_mod" in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )
