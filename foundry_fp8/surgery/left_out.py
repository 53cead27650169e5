"""Why a linear stays in high precision: it cannot be converted, or is left out unless ``include`` names it.

Left out are output heads, routers of mixtures of experts, adapters (LoRA) and what shares its weight with an embedding. A
glob of ``include`` takes such a layer in if it names it, that is, if the glob would not match under another name of the
part that gives the layer away: ``*.gate`` names a router and ``*lora_A*`` an adapter, ``*`` and ``model.layers.*`` do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from foundry_fp8.layers.dtensor import is_dtensor
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.blocks import block_index_of, transformer_blocks
from foundry_fp8.model_structure.experts import router_modules
from foundry_fp8.model_structure.selection import matches

__all__ = ["LeftOut", "left_out", "output_heads", "unconvertible", "unfit"]

HEAD = "output heads stay in high precision"
ROUTER = "mixture-of-experts routers stay in high precision"
ADAPTER = "adapters (LoRA) stay in high precision"
TIED = "its weight is tied to an embedding"
HEAD_NAMES = ("embed_out", "head", "score", "classifier", "fc")
"""What heads are called, or the module whose last linear they are (``classifier.6``), in models where no blocks show what comes
after them; besides any ``lm_head``."""


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Why a linear is left out unless it is named."""

    reason: str
    part: int = -1
    """The part of its name that gives it away."""

    def named_by(self, name: str, patterns: Sequence[str]) -> bool:
        """Whether one of ``patterns`` means this layer, ``name``, and does not take it in among others."""
        parts = name.split(".")
        parts[self.part] = "\0"
        return any(matches(name, [p]) and not matches(".".join(parts), [p]) for p in patterns)


def left_out(model: nn.Module, linears: Sequence[tuple[str, nn.Module]]) -> dict[str, LeftOut]:
    """By name, those of ``linears`` that are left out unless they are named, and why."""
    heads = set(output_heads(model)) | _after_blocks(model, linears)
    routers = dict(router_modules(model)).values()
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    adapters = [  # modules beside a base layer: PEFT's, by the attribute that lists them
        f"{name}.{part}".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module._modules.get("base_layer"), nn.Module)
        for part in getattr(type(module), "adapter_layer_names", ())
    ]
    blocks = transformer_blocks(model)

    def reason(name: str, linear: nn.Module) -> LeftOut | None:
        parts = name.split(".")
        adapter = next((a for a in adapters if f"{name}.".startswith(f"{a}.")), None)
        if adapter is not None:
            return LeftOut(ADAPTER, adapter.count("."))
        if linear in routers:
            return LeftOut(ROUTER)
        if "router" in parts:
            return LeftOut(ROUTER, parts.index("router"))
        if id(linear.weight) in embeddings:
            return LeftOut(TIED)
        lm_head = next((i for i, part in enumerate(parts) if "lm_head" in part), None)
        if lm_head is not None:
            return LeftOut(HEAD, lm_head)
        if linear in heads:
            return LeftOut(HEAD)
        called = next((i for i, part in enumerate(parts) if part in HEAD_NAMES), None)
        if called is not None and block_index_of(name, blocks) is None:
            holder = ".".join(parts[: called + 1])
            if [n for n, _ in linears if f"{n}.".startswith(f"{holder}.")][-1] == name:
                return LeftOut(HEAD, called)
        return None

    found = {name: reason(name, linear) for name, linear in linears}
    return {name: why for name, why in found.items() if why is not None}


def output_heads(model: nn.Module) -> Iterator[nn.Module]:
    """What Hugging Face models (MPT and FOG among them) call their output embeddings: a linear, or the input embedding."""
    for module in model.modules():
        accessor = getattr(module, "get_output_embeddings", None)
        if accessor is None:
            continue
        try:
            head = accessor()
        except (AttributeError, NotImplementedError):  # models without a head do either
            continue
        if isinstance(head, nn.Module):
            yield head


def unconvertible(model: nn.Module, linears: Sequence[tuple[str, nn.Module]]) -> dict[nn.Module, str]:
    """Those of ``linears`` that no recipe and no option converts, and why."""
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            found[module.out_proj] = "nn.MultiheadAttention reads its weight without calling it"
    for _, linear in linears:
        weight = linear._parameters.get("weight")
        why = "its weight is parametrised" if weight is None else unfit(weight)
        why = "it is converted already" if isinstance(linear, FP8Linear) else why
        if why is not None:
            found.setdefault(linear, why)
    return found


def unfit(weight: Tensor) -> str | None:
    """Why no layer multiplies by ``weight`` in FP8, or ``None``."""
    if is_lazy(weight):
        return "its weight has no shape yet; run the model once before"
    if is_dtensor(weight):
        return (
            "its weight is a DTensor: it was sharded before the conversion, which has to come first. Load the model without tp_plan, convert it, "
            "then call parallelize_module"
        )
    if isinstance(weight, FrozenFP8Weight):
        return None if weight.dim() == 2 else "its experts keep the FP8 codes of a checkpoint"
    if hasattr(weight, "__tensor_flatten__"):  # as whatever wraps other tensors: a quantised weight
        return f"its weight is a {type(weight).__name__}, which wraps other tensors"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its weight is {weight.dtype}"
    return None


def _after_blocks(model: nn.Module, linears: Sequence[tuple[str, nn.Module]]) -> set[nn.Module]:
    """The linears registered after the last transformer block: heads, whatever their name."""
    inside = {m for _, block in transformer_blocks(model) for m in block.modules()}
    position = {module: i for i, module in enumerate(model.modules())}
    last = max((position[m] for m in inside), default=len(position))
    return {linear for _, linear in linears if linear not in inside and position[linear] > last}
