"""The model of a case: in its number formats, with or without weights, and where weights come from then."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import foundry_fp8
from tests.combinations.models import blocks_of, build
from tests.combinations.space import Case
from tests.combinations.wrapping import clean

NATIVE = {
    "llama": ["*.1.self_attn.q_proj", "*.1.self_attn.k_proj"],
    "plain": ["*.0.attention.qkv", "*.1.mlp.down"],
    "odd": ["*.1.mlp.up", "*.1.mlp.gate"],
}
"""What is converted to native: Triton's interpreter takes a tenth of a second a layer and step."""
POLICY = [
    {"blocks": "last-1", "roles": ["mlp"], "recipe": "block"},
    {"roles": ["attention"], "recipe": "delayed"},
    {"recipe": "current", "gemms": {"wgrad": "high_precision"}},
]
"""Of ``fp8="policy"``: three recipes in two blocks, and one GEMM in high precision."""
OWN_RECIPE = {"recipe": "delayed", "grad_scores": "bfloat16"}
LORA = {"llama": ["q_proj", "v_proj", "up_proj"], "plain": ["qkv", "up"], "odd": ["qkv", "gate"]}


def numerics(case: Case, *, weights: bool = True, **fp8: Any) -> nn.Module:
    """The model of a case in its number formats; nothing else is switched on. Without weights it is on the meta device."""
    model = build(case.model, tied=case.tied)
    if case.lora:
        add_lora(model, LORA[case.model])
    if case.frozen:
        freeze(model)
    if case.frozen_weights:
        round_frozen(model, getattr(torch, case.dtype))
    if not weights:
        take_weights(model)
        fp8["device"] = "cpu"
    if case.fp8 != "none":
        backend, _, recipe = case.fp8.rpartition("-")
        if backend:
            fp8["include"] = [
                p + s for p in NATIVE[case.model] for s in ([".base_layer"] if in_lora(case, p) else [""])
            ]
        if recipe == "policy":
            two = zip(fp8.pop("include", ()), ("delayed", "block"), strict=False)
            recipe = [{"modules": p, "recipe": r} for p, r in two] or POLICY
        attention = OWN_RECIPE if case.attention == "delayed" else case.attention
        foundry_fp8.apply_fp8(model, recipe=recipe, backend=backend or "emulated", attention=attention, **fp8)
    return model


def in_lora(case: Case, pattern: str) -> bool:
    return case.lora and pattern.rpartition(".")[2] in LORA[case.model]


def add_lora(model: nn.Module, targets: list[str]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(3)  # A and B both random: with B = 0, as usual, A has no gradient
    inject_adapter_in_model(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), model)


def freeze(model: nn.Module) -> None:
    """The embedding and the first block."""
    frozen = [m for m in model.modules() if isinstance(m, nn.Embedding)] + blocks_of(model)[:1]
    for module in frozen:
        module.requires_grad_(False)


def round_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """To what autocast computes in: FP8 weights are made from that then."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.copy_(parameter.to(dtype))


def build_exact(case: Case) -> nn.Module:
    high = Case(**{**{f: getattr(case, f) for f in ("model", "lora", "frozen", "tied")}})
    return numerics(high).double()


def take_weights(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = empty
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")


class Source:
    """Where a model without weights gets them: from a copy on this rank (``meta``), or from rank 0 (``mixed``)."""

    def __init__(self, case: Case) -> None:
        self.mixed = case.init == "mixed"
        self.model = numerics(Case(model=case.model, lora=case.lora, frozen=case.frozen))

    def tensor(self, name: str) -> Tensor:
        """The parameter or buffer ``name``, whole."""
        found = self.model.get_parameter(name) if name in self.parameters else self.model.get_buffer(name)
        found = found.detach().clone()
        if self.mixed:
            if dist.get_rank() != 0:
                found.zero_()
            dist.broadcast(found, 0)
        return found

    @functools.cached_property
    def parameters(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters()}

    def fsdp1(self, model: nn.Module) -> dict[str, Any]:
        """What torch's FSDP1 gets. It sends rank 0's weights to the others itself, but not on a CPU, unless not asked."""
        names = {module: clean(name) for name, module in model.named_modules()}

        def initialise(module: nn.Module) -> None:
            module.to_empty(device=torch.device("cpu"), recurse=False)
            with torch.no_grad():
                for name, tensor in (
                    *module.named_parameters(recurse=False),
                    *module.named_buffers(recurse=False),
                ):
                    if not self.mixed:
                        tensor.copy_(self.tensor(f"{names[module]}.{name}".lstrip(".")))

        if self.mixed:
            from torch.distributed.fsdp import _init_utils

            _init_utils._check_module_states_for_sync_module_states = lambda module: None
        return {"param_init_fn": initialise, "sync_module_states": self.mixed}

    def fill(self, model: nn.Module) -> None:
        """Every shard of an FSDP2 model."""
        if next(model.parameters()).device.type == "meta":
            model.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                whole = self.tensor(clean(name))
                assert isinstance(parameter, DTensor)
                parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
            for name, buffer in model.named_buffers():
                buffer.copy_(self.tensor(clean(name)))
