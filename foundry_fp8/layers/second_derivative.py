"""FP8 layers have a first derivative only, and none inside of a transform."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_fp8.compat.autograd import batched, transformed

__all__ = ["refuse_second_derivative", "refuse_transforms"]


def refuse_transforms(fqn: str, input: Tensor | None = None) -> None:
    """Call it where ``input`` reaches a layer that runs FP8, and where a backward does.

    Raises:
        RuntimeError: Something transforms the layer (``torch.func``, forward mode, an ONNX export), or ``input`` is nested.
    """
    if transformed():
        what = "torch.func (grad, vmap, jvp, jacrev, ...), is_grads_batched and forward mode transform what FP8 layers do outside of autograd"
        way = "Use backward() and a loop"
    elif torch.onnx.is_in_onnx_export():
        what, way = "ONNX has no FP8 GEMMs", "Export with evaluate: high_precision, the default, in eval()"
    elif input is not None and input.is_nested:
        what, way = "a nested tensor has no rows to scale", "Give it x.values(), and nest what comes out"
    else:
        return
    raise RuntimeError(
        f"{fqn}: {what}. {way}, or leave the layer in high precision (algorithms.fp8.exclude)."
    )


def refuse_second_derivative(fqn: str) -> None:
    """Call it where a backward reaches an FP8 layer.

    Its backward quantises and multiplies by means that autograd does not see, or would differentiate as if the rounding were
    not there: differentiated again it would be wrong without a word.

    Args:
        fqn: The layer's name.

    Raises:
        RuntimeError: This backward is being recorded, to be differentiated again.
    """
    if batched():
        refuse_transforms(fqn)
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{fqn}: FP8 layers have no second derivative. Call backward without create_graph=True, or leave the layers that it "
            "goes through in high precision (algorithms.fp8.exclude)."
        )
