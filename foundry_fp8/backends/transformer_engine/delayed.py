"""Delayed scaling through Transformer Engine's kernels, with our state.

TE's delayed quantiser reads ``scale`` from, and takes the largest |x| into, two tensors that are attributes of a Python
object and are looked up at every cast. They are pointed at the slots of
:class:`~foundry_fp8.layers.delayed_scaling.DelayedScalingState`, and the module is kept out of TE's global buffers. What follows:

* one state in every backend: saved with the algorithm, fixed shapes, resumes bit-exact, nothing of it in the model;
* one all-reduce a forward pass, where TE makes two, and none that hangs when ranks run different modules;
* scales stand still between two training forwards, so a recompute by activation checkpointing is bit-identical without
  TE's stash of scales, and layers may nest their own autocast, which would break TE's own reduction.

The update itself follows TE's kernel (see :mod:`foundry_fp8.layers.delayed_scaling`).

Source: TE 2.4 to 2.20, ``pytorch/csrc/quantizer.cpp`` (``Float8Quantizer``), ``pytorch/module/base.py``
(``prepare_forward``), ``FP8GlobalStateManager.add_fp8_tensors_to_global_buffer``.
"""

from __future__ import annotations

from typing import Any

import torch

from foundry_fp8.backends.transformer_engine.library import Library
from foundry_fp8.layers.delayed_scaling import DelayedSlot
from foundry_fp8.layers.gemm_layer import Slots

__all__ = ["bind", "bind_slots", "keep_out_of_global_buffers"]

_PLACES = {"x": ("scaling_fwd", 0), "w": ("scaling_fwd", 1), "dy": ("scaling_bwd", 0)}
"""Operand -> where TE keeps its quantiser: GEMM1_INPUT, GEMM1_WEIGHT, GRAD_OUTPUT1."""


def keep_out_of_global_buffers(te_module: Any, library: Library) -> None:
    """Make TE believe that the module takes part in its amax reduction already, so that it never does."""
    te_module.fp8_meta[library.quantization.FP8GlobalStateManager.get_buffer_info()] = ()


def bind_slots(te_module: Any, slots: Slots, *, record: bool) -> None:
    """Point the module's quantisers at our scales and amaxes. Call it inside TE's autocast, before each forward.

    Args:
        te_module: A ``te.Linear`` or ``te.LayerNormLinear``.
        slots: Where scales are read and amaxes recorded.
        record: ``False`` leaves the histories alone: the forward tensors' amaxes go to a scratch tensor.

    Raises:
        RuntimeError: TE's quantisers are not what they were.
    """
    # Makes the quantisers; the forward's own call then returns at once.
    te_module.init_fp8_metadata(num_gemms=1)
    for operand, slot in slots.items():
        group, index = _PLACES[operand]
        bind(te_module.quantizers[group][index], operand, slot, record or operand == "dy")


def bind(quantizer: Any, operand: str, slot: DelayedSlot, record: bool) -> None:
    """Point one quantiser at a slot's scale, and at its amax to ``record``; raises as :func:`bind_slots`."""
    if type(quantizer).__name__ != "Float8Quantizer" or not hasattr(quantizer, "amax"):
        raise RuntimeError(
            f"Transformer Engine quantises {operand} with {type(quantizer).__name__}, not with the Float8Quantizer that "
            "delayed scaling is bound to. Install a release from 2.4 to 2.20, unset NVTE_DPA_FP8_RECIPE, or adapt "
            "backends/transformer_engine."
        )
    quantizer.scale = slot.scale.view(1)
    amax = slot.amax_history[0].view(1)
    quantizer.amax = amax if record else torch.zeros_like(amax)
