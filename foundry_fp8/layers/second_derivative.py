"""FP8 layers have a first derivative only."""

from __future__ import annotations

import torch

__all__ = ["refuse_second_derivative"]


def refuse_second_derivative(fqn: str) -> None:
    """Call it where a backward reaches an FP8 layer.

    Its backward quantises and multiplies by means that autograd does not see, or would differentiate as if the rounding were
    not there: differentiated again it would be wrong without a word.

    Args:
        fqn: The layer's name.

    Raises:
        RuntimeError: This backward is being recorded, to be differentiated again.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{fqn}: FP8 layers have no second derivative. Call backward without create_graph=True, or leave the layers that it "
            "goes through in high precision (algorithms.fp8.exclude)."
        )
