"""Names and shapes of a Hugging Face checkpoint, where the model's parameters have others (transformers 5): experts in one parameter, modules renamed.

Cause: the mapping that transformers 5 loads and saves by has no public name
(https://github.com/huggingface/transformers/blob/main/src/transformers/core_model_loading.py); in transformers 4 modules are named as in
checkpoints. Remove when there is a public one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["checkpoint_form", "renamed_by"]


def checkpoint_form(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors``, some of the ``PreTrainedModel``'s by name, as ``save_pretrained`` would write them; split ones are views."""
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    loaded_by = getattr(model, "_weight_conversions", None)
    if getattr(model, "hf_quantizer", None) is not None:  # what dequantised at loading is not undone
        model._weight_conversions = None
    try:
        found: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    finally:
        model._weight_conversions = loaded_by
    return found


def renamed_by(model: Any) -> Callable[[str], str]:
    """How ``from_pretrained`` of transformers 5 spells a checkpoint's name for ``model``, experts apart; as it is for any other model."""
    if not hasattr(type(model), "config_class"):
        return str
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5 or not isinstance(model, transformers.PreTrainedModel):
        return str
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    return lambda name: rename_source_key(name, renamings, [])[0]  # type: ignore[no-any-return]
