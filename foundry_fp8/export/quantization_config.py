"""The ``quantization_config`` of a config.json, by the package that defines it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection
from typing import Any

from foundry_fp8.export.layout import stored_block
from foundry_fp8.numerics.recipes import Recipe
from foundry_fp8.surgery.report import kind_of

__all__ = ["check_library", "finegrained_config", "quantization_config"]


def check_library() -> None:
    """Raise :class:`RuntimeError` where compressed-tensors is not installed."""
    if importlib.util.find_spec("compressed_tensors") is None:
        raise RuntimeError(
            "an export needs the package compressed-tensors, which defines the layout: pip install 'foundry-fp8[export]'"
        )


def quantization_config(layers: Collection[str], others: Collection[str], recipe: Recipe) -> dict[str, Any]:
    """FP8 weights with one static scale, one a row or a block, and inputs with a static scale or none, in the format ``float-quantized``; or
    NVFP4 weights beside inputs in high precision, in ``nvfp4-pack-quantized``.

    Args:
        layers: Names of the quantised linears.
        others: Names of the linears that stay in high precision.
        recipe: What they were trained with. Where it does not know scales before an input, the server takes them from each.

    Returns:
        Plain values.

    Raises:
        RuntimeError: ``compressed-tensors`` is not installed, or knows no blocks.

    Source:
        https://github.com/vllm-project/compressed-tensors, its ``QuantizationConfig``.
    """
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        preset_name_to_scheme,
    )

    by_row, block = recipe.by_row, stored_block(recipe)
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    of_weights = {"strategy": "channel" if by_row else "tensor"}
    of_inputs: dict[str, Any] = {"strategy": "token" if by_row else "tensor"}
    if block is not None:
        of_weights = {"strategy": "block", "block_structure": f"{block[0]}x{block[1]}"}
        of_inputs = {"strategy": "group", "group_size": block[1]}
    # By class, which every release of vLLM matches, in experts too; and by name, since a model's linears need not be nn.Linear itself.
    names = {"re:" + re.escape(kind_of(name)).replace(r"\*", r"\d+") + "$" for name in layers}
    targets = ["Linear", *sorted(names)]
    try:
        scheme = (
            preset_name_to_scheme("NVFP4A16", targets)
            if recipe.element_bits == 4
            else QuantizationScheme(
                targets=targets,
                weights=QuantizationArgs(**fp8, **of_weights, dynamic=False),
                input_activations=QuantizationArgs(**fp8, **of_inputs, dynamic=not recipe.scales_known),
            )
        )
    except ValueError as error:
        raise RuntimeError(
            f"export: this compressed-tensors has no {of_inputs}. Install a newer one (0.20 has), or --layout fp8."
        ) from error
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="nvfp4-pack-quantized" if recipe.element_bits == 4 else "float-quantized",
        quantization_status="compressed",
        ignore=sorted(others),
    )
    found: dict[str, Any] = config.model_dump(mode="json")
    return found


def finegrained_config(others: Collection[str], recipe: Recipe, e8m0: bool) -> dict[str, Any]:
    """The same for FineGrainedFP8 (DeepSeek-V3's and Qwen3's layout): a scale a block, inputs by as many of a token's elements as they come.

    Source:
        transformers 5.24, ``FineGrainedFP8Config``.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(stored_block(recipe) or ()),
        "modules_to_not_convert": sorted(others),
        **({"scale_fmt": "ue8m0"} if e8m0 else {}),
    }
