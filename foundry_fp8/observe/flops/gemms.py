"""The GEMMs of a model's linear layers: read from the modules, in units of FLOPs per token.

One linear of ``[in, out]`` costs ``2 * tokens * in * out`` in each of its GEMMs: fprop always, dgrad where its input
needs a gradient, wgrad where its weight does. Embedding look-ups, norms, rotary embeddings, softmax, activation
functions and the optimizer count 0, as in every published MFU.

What is counted: ``nn.Linear`` and its subclasses, anything else with ``in_features``, ``out_features`` and a weight
(Transformer Engine), Hugging Face's ``Conv1D``, routers that multiply by a parameter of their own, a head that shares the embedding's weight (once, as the head), and
experts at the share of tokens that reaches each. :func:`uncounted_matrices` names what is left.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from foundry_fp8.model_structure.blocks import transformer_blocks
from foundry_fp8.model_structure.experts import router_modules
from foundry_fp8.model_structure.names import clean_name, named_modules_clean

__all__ = ["Gemm", "gemms_of", "uncounted_matrices"]


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One linear layer.

    Attributes:
        name: The module's name, without wrapper parts; ``<embedding>.unembed`` for a tied head.
        in_features: K of fprop.
        out_features: N of fprop.
        share: Part of the tokens that passes through (``top_k / experts`` in a mixture, otherwise 1).
        dgrad: The input needs a gradient.
        wgrad: The weight needs a gradient.
    """

    name: str
    in_features: int
    out_features: int
    share: float = 1.0
    dgrad: bool = True
    wgrad: bool = True

    @property
    def per_token(self) -> float:
        """FLOPs of one of the three GEMMs for one token of the batch."""
        return 2.0 * self.in_features * self.out_features * self.share

    def flops(self, tokens: float) -> dict[str, float]:
        """FLOPs of each GEMM for ``tokens`` tokens: ``{"fprop": ..., "dgrad": ..., "wgrad": ...}``."""
        one = self.per_token * tokens
        return {"fprop": one, "dgrad": one * self.dgrad, "wgrad": one * self.wgrad}


def gemms_of(model: nn.Module) -> list[Gemm]:
    """Every linear layer that a forward pass of ``model`` runs, in the order of registration.

    ``dgrad`` is decided by that order: an input needs a gradient if any parameter registered before the layer is
    trained. That is exact for a decoder that is trained whole; in the first trained block of a partly frozen or LoRA
    model it can be a projection off, which :class:`~foundry_fp8.callbacks.mfu_monitor.MFUMonitor` corrects from what
    the first batch shows.
    """
    gemms: list[Gemm] = []
    shares = _expert_shares(model)
    routers = {id(router) for _, router in router_modules(model)}
    trained_before = False
    seen: set[int] = set()
    for name, module in named_modules_clean(model):
        shape = linear_shape(module)
        if shape is None and id(module) in routers:  # transformers 5's, [experts, hidden size]
            experts, hidden_size = module.get_parameter("weight").shape
            shape = hidden_size, experts
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        if shape is not None:
            weight = getattr(module, "weight", None)
            trained = bool(weight is not None and weight.requires_grad)
            share = next((s for container, s in shares.items() if name.startswith(f"{container}.")), 1.0)
            gemms.append(Gemm(name, *shape, share, trained_before, trained))
        elif (
            name.rpartition(".")[2] == "experts" and name in shares and not isinstance(module, nn.ModuleList)
        ):
            gemms.extend(_fused_experts(name, module, shares[name], trained_before))
        seen.update(id(p) for p in own)
        trained_before = trained_before or any(p.requires_grad for p in own)
    head = _tied_head(model, gemms, trained_before)
    return gemms if head is None else [*gemms, head]


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """``(in_features, out_features)`` of a linear layer, from attributes that sharding leaves alone; else ``None``."""
    kinds = [("in_features", "out_features")]
    if type(module).__name__ == "Conv1D":  # transformers.pytorch_utils.Conv1D (GPT-2)
        kinds.append(("nx", "nf"))
    for names in kinds:
        k, n = (getattr(module, name, None) for name in names)
        if isinstance(k, int) and isinstance(n, int) and hasattr(module, "weight"):
            return k, n
    return None


def uncounted_matrices(model: nn.Module, gemms: list[Gemm]) -> list[str]:
    """Names of parameters with two or more dimensions that are neither in ``gemms`` nor an embedding.

    Call it before FSDP flattens the parameters. A result that is not empty means the count is too low.
    """
    counted = {gemm.name for gemm in gemms}
    fused = {name.rpartition(".experts")[0] + ".experts" for name in counted if ".experts." in name}
    missing = []
    for name, module in named_modules_clean(model):
        if name in counted or isinstance(module, nn.Embedding) or any(name.startswith(f) for f in fused):
            continue
        own = module.named_parameters(recurse=False)
        missing += [f"{name}.{p}".lstrip(".") for p, value in own if value.dim() >= 2]
    return missing


def _expert_shares(model: nn.Module) -> dict[str, float]:
    """``{name of an "experts" container: top_k / number of experts}``."""
    shares: dict[str, float] = {}
    for name, module in named_modules_clean(model):
        experts = module._modules.get("experts")
        if experts is None:
            continue
        beside = [module, *map(module._modules.get, ("router", "gate"))]
        sources = [*beside, *(getattr(module, name, None) for name in ("args", "config"))]
        top_k = first_int(sources, "top_k", "num_experts_per_tok", "moe_top_k")
        counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        said = first_int([experts, *sources], *counts)
        count = len(experts) if isinstance(experts, nn.ModuleList) else said
        if top_k is None or not count:
            raise ValueError(
                f"{clean_name(name)}: a mixture of experts that does not say how many experts a token passes through. "
                "Looked for top_k, num_experts_per_tok and moe_top_k."
            )
        shares[f"{name}.experts" if name else "experts"] = top_k / count
    return shares


def first_int(sources: list[Any], *names: str) -> int | None:
    """The first of the attributes ``names`` that is a number, of the first of ``sources`` that has one."""
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _fused_experts(name: str, module: nn.Module, share: float, trained_before: bool) -> list[Gemm]:
    """Experts kept as one parameter each way (``[E, in, out]``, or ``[E * in, out]`` in MegaBlocks)."""
    found = []
    for p, value in module.named_parameters():
        if value.dim() >= 2:
            sizes = value.numel() // value.shape[-1], value.shape[-1]
            found.append(Gemm(f"{name}.{p}", *sizes, share, trained_before, value.requires_grad))
    return found


def _says_tied(module: nn.Module) -> bool:
    try:
        return getattr(getattr(module, "config", None), "tie_word_embeddings", False) is True
    except KeyError:
        # The config that LLM Foundry 0.22 gives MPT's rotary embedding (rope_impl: hf) raises for what it does not hold.
        return False


def _tied_head(model: nn.Module, gemms: list[Gemm], trained_before: bool) -> Gemm | None:
    """The head of a model that multiplies by its token embedding instead of having a layer of its own."""
    vocabularies = {
        getattr(module.config, "vocab_size", None) for module in model.modules() if _says_tied(module)
    }
    blocks = tuple(f"{clean_name(block)}." for block, _ in transformer_blocks(model)) or ("\0",)
    for name, module in named_modules_clean(model):
        if not isinstance(module, nn.Embedding):
            continue
        # LLM Foundry's SharedEmbedding is the head as well, unless the model has a head layer.
        shared = type(module).__name__ == "SharedEmbedding" or module.num_embeddings in vocabularies
        has_head = any(
            not gemm.name.startswith(blocks) and gemm.out_features == module.num_embeddings for gemm in gemms
        )
        if shared and not has_head:
            sizes = module.embedding_dim, module.num_embeddings
            return Gemm(f"{name}.unembed", *sizes, 1.0, trained_before, module.weight.requires_grad)
    return None
