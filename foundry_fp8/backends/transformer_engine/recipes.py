"""Our recipes as Transformer Engine's.

TE's recipes are pydantic dataclasses that drop unknown fields in silence, take some defaults from environment variables
when they are imported, and ignore two of their own: ``use_power_2_scales`` (current) and ``use_f32_scales`` (block) drive
class attributes that were frozen at import. So every field is checked to exist, every default is given, and the
quantisation parameters and the accumulation of each GEMM are set on the instance, where TE's modules read them.

Source: TE 2.4, 2.8 and 2.20, ``common/recipe/__init__.py`` and ``pytorch/module/linear.py``
(``_customize_quantizers_float8_current_scaling``).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from foundry_fp8.backends.transformer_engine.library import library
from foundry_fp8.numerics.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Gemm,
    MXFP8Scaling,
    NVFP4Scaling,
    Recipe,
    TensorwiseRecipe,
)

__all__ = ["te_recipe_of"]

_CLASSES: dict[type[Recipe], str] = {
    DelayedScaling: "DelayedScaling",
    CurrentScaling: "Float8CurrentScaling",
    BlockScaling: "Float8BlockScaling",
    MXFP8Scaling: "MXFP8BlockScaling",
    NVFP4Scaling: "NVFP4BlockScaling",
}
_QPARAMS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
_SPLIT_ACCUMULATOR: dict[str, Gemm] = {
    "fp8_gemm_fprop": "fprop",
    "fp8_gemm_dgrad": "dgrad",
    "fp8_gemm_wgrad": "wgrad",
}
"""Where TE's modules look for a GEMM's accumulation; a recipe that lacks them (delayed) gets TE's default otherwise."""
_OPTIONAL = {
    "backward_override": None,
    "enable_2d_quantization": False,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
}
"""Fields of newer releases, given so that no environment variable decides them."""


@functools.lru_cache(maxsize=32)
def te_recipe_of(recipe: Recipe) -> Any:
    """TE's recipe for ours; the same object every time, by which TE's state is recognised.

    For delayed scaling TE is given a history of one entry: the histories, the scales and their update are
    :class:`~foundry_fp8.layers.delayed_scaling.DelayedScalingState`'s, and TE's own stay unused.

    Raises:
        RuntimeError: The installed release lacks the recipe, or a field that it needs.
    """
    te, name = library(), _CLASSES[type(recipe)]
    cls = getattr(te.recipe, name, None)
    if cls is None:
        raise RuntimeError(
            f"Transformer Engine {te.version} has no recipe {name}. Install 2.4 or later, or use another recipe."
        )
    formats = {"hybrid": te.recipe.Format.HYBRID, "e4m3": te.recipe.Format.E4M3}
    fields: dict[str, Any] = {"fp8_format": formats[recipe.fp8_format]}
    if (history := recipe.history) is not None:
        fields |= {
            "margin": history.margin,
            "amax_history_len": 1,
            "amax_compute_algo": history.amax_compute_algo,
            "reduce_amax": False,
        }
    if isinstance(recipe, NVFP4Scaling):
        fields |= {
            "disable_rht": not recipe.hadamard,
            "disable_stochastic_rounding": not recipe.stochastic_rounding,
            "disable_2d_quantization": not recipe.square_weights,
        }
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise RuntimeError(
            f"Transformer Engine {te.version}'s {name} has no field {', '.join(unknown)}, which foundry_fp8 sets. "
            "Install a release from 2.4 to 2.20, or adapt backends/transformer_engine/recipes.py."
        )
    made = cls(**fields, **{field: value for field, value in _OPTIONAL.items() if field in known})

    if hasattr(recipe, "power_2_scales"):
        missing = [attribute for attribute in _QPARAMS if not hasattr(made, attribute)]
        if missing:
            raise RuntimeError(
                f"Transformer Engine {te.version}'s {name} has no {missing[0]}, through which power_2_scales is set. "
                "Install a release from 2.4 to 2.20, or adapt backends/transformer_engine/recipes.py."
            )
        for attribute in _QPARAMS:
            old = getattr(made, attribute)
            setattr(made, attribute, dataclasses.replace(old, power_2_scale=recipe.power_2_scales))
    if isinstance(recipe, TensorwiseRecipe):
        for attribute, gemm in _SPLIT_ACCUMULATOR.items():
            precise = not recipe.accumulates_fast(gemm)
            setattr(made, attribute, te.recipe.MMParams(use_split_accumulator=precise))
    return made
