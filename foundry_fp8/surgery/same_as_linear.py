"""Whether a module computes what ``nn.Linear`` computes, shown by running it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from foundry_fp8.compat.fake_tensor import unset_fake_temporarily
from foundry_fp8.layers.linear import FP8Linear, FP8TransposedLinear
from foundry_fp8.layers.unit_linear import FP8UnitLinear, UnitLinear
from foundry_fp8.model_structure.forms import random_tensors, without_contents

__all__ = ["features_of", "forward_of_its_own", "linear_form", "looks_linear"]

_IN, _OUT = 6, 10
_TOLERANCE = 1e-12
"""Of float64 products of a few dozen terms of order 1."""


def looks_linear(module: nn.Module) -> bool:
    """Whether ``module`` is an ``nn.Linear``, or a ``Conv1D`` of transformers (``nx``, ``nf``, a weight ``[nx, nf]``)."""
    return isinstance(module, nn.Linear) or _is_transposed(module)


def features_of(module: nn.Module) -> tuple[int, int]:
    """``(in_features, out_features)`` of a module that :func:`looks_linear`."""
    names = ("nx", "nf") if _is_transposed(module) else ("in_features", "out_features")
    return getattr(module, names[0]), getattr(module, names[1])


def linear_form(module: nn.Module) -> type[FP8Linear] | None:
    """The converted form of a module that :func:`looks_linear`, or ``None`` if it computes something else.

    ``nn.Linear`` itself needs no proof. Another class (Falcon's ``x @ W.T + b``, GPT-2's ``Conv1D``) has to give the output and
    the gradients of ``x W^T + b`` in float64, in both modes, on a small copy of the module with random parameters; what
    holds parameters, buffers or modules besides (an adapter, a scale) is refused unseen. A :class:`UnitLinear` has a form of
    its own.
    """
    form = FP8TransposedLinear if _is_transposed(module) else FP8Linear
    if _forward_replaced(module):
        return None
    if type(module).forward is UnitLinear.forward:
        return FP8UnitLinear
    if type(module).forward is nn.Linear.forward:
        return form
    alone = set(module._parameters) <= {"weight", "bias"} and not module._buffers and not module._modules
    with unset_fake_temporarily():
        return form if alone and all(_same(module, form, training) for training in (True, False)) else None


def forward_of_its_own(module: nn.Module) -> str:
    """Why :func:`linear_form` finds none."""
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        return (
            f"Accelerate's hook {type(hook).__name__} has replaced its forward: load the model without device_map and offloading, or call "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True) first"
        )
    if _forward_replaced(module):
        return "its forward has been replaced by another function, which only its owner knows"
    return f"its class {type(module).__name__} has a forward of its own, which is not x W^T + b"


def _forward_replaced(module: nn.Module) -> bool:
    own = module.__dict__.get("forward")  # Accelerate leaves the class's own there, where its hooks were
    return own is not None and getattr(own, "__func__", own) is not type(module).forward


def _is_transposed(module: nn.Module) -> bool:
    return not isinstance(module, nn.Linear) and all(
        isinstance(getattr(module, name, None), int) for name in ("nx", "nf")
    )


def _same(module: nn.Module, form: type[FP8Linear], training: bool) -> bool:
    random = random_tensors()
    weight = nn.Parameter(random(_IN, _OUT) if form is FP8TransposedLinear else random(_OUT, _IN))
    bias = None if module.bias is None else nn.Parameter(random(_OUT))
    copy = _small_copy(module, weight, bias, training)
    for shape in ((5, _IN), (2, 3, _IN)):
        x, dy = random(*shape).requires_grad_(), random(*shape[:-1], _OUT)
        inputs = [t for t in (x, weight, bias) if t is not None]
        try:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                found = type(module).forward(copy, x)
                expected = F.linear(x, weight.t() if form is FP8TransposedLinear else weight, bias)
                pairs = zip(
                    (found, *torch.autograd.grad(found, inputs, dy)),
                    (expected, *torch.autograd.grad(expected, inputs, dy)),
                    strict=True,
                )
        except Exception:  # somebody else's forward, on a module it was not written for, may raise anything
            return False
        if not all(
            a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=_TOLERANCE)
            for a, b in pairs
        ):
            return False
    return True


def _small_copy(
    module: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None, training: bool
) -> nn.Module:
    sizes = {"in_features": _IN, "out_features": _OUT, "nx": _IN, "nf": _OUT}
    changed = {key: size for key, size in sizes.items() if key in module.__dict__}
    copy = without_contents(module, changed, training=training)
    copy.register_parameter("weight", weight)
    copy.register_parameter("bias", bias)
    return copy
