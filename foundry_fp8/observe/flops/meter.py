"""FLOPs of one device as training goes: from the ledgers of converted layers, from the model's shapes for the rest."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.layers.ledger import GemmLedger
from foundry_fp8.layers.product_operators import ATTENTION, LINEAR
from foundry_fp8.model_structure.names import named_modules_clean
from foundry_fp8.observe.flops.attention import (
    Mask,
    attended_pairs,
    attention_shapes,
    documents_of,
    in_chunks,
    packed_pairs,
)
from foundry_fp8.observe.flops.gemms import Gemm, gemms_of
from foundry_fp8.observe.flops.observer import Observed
from foundry_fp8.observe.flops.utilisation import Flops
from foundry_fp8.surgery.attention import FP8AttentionState

__all__ = ["FlopMeter", "Tokens"]


@dataclasses.dataclass
class Tokens:
    """What batches held on this device; tensors where the batch was on an accelerator, so that nothing waits.

    Attributes:
        computed: Tokens that went through the model, padding included.
        real: Of these, not padding.
        pairs: Attended pairs, by kind of mask.
    """

    computed: int = 0
    real: int | Tensor = 0
    pairs: dict[Mask, int | Tensor] = dataclasses.field(default_factory=lambda: defaultdict(int))


class FlopMeter:
    """Counts what a model does.

    Raises:
        ValueError: A model whose attention or experts cannot be counted.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(named_modules_clean(model))
        gemms = gemms_of(model)
        self.ledgers: dict[str, GemmLedger] = {
            gemm.name: modules[gemm.name].ledger  # type: ignore[misc]
            for gemm in gemms
            if isinstance(getattr(modules.get(gemm.name), "ledger", None), GemmLedger)
        }
        self.modules = modules
        self.static = [gemm for gemm in gemms if gemm.name not in self.ledgers]
        self.converted = [gemm for gemm in gemms if gemm.name in self.ledgers]
        self.attention = attention_shapes(model)
        converted_attention = FP8AttentionState.of(model)
        self.fp8_attention = {} if converted_attention is None else converted_attention.modules
        self.masks: set[Mask] = {shape.mask for shape in self.attention}
        self.observed: Mapping[str, Observed] = {}
        self.high_precision = "fp32"

    def to_watch(self) -> list[tuple[str, nn.Module, tuple[str, ...]]]:
        """The modules that a :class:`~foundry_fp8.observe.flops.observer.Observer` should watch."""
        names = (gemm.name for gemm in self.static if gemm.name in self.modules)
        linears = [(name, self.modules[name], LINEAR) for name in names]
        return linears + [(shape.name, self.modules[shape.name], ATTENTION) for shape in self.attention]

    def settle(self, observed: Mapping[str, Observed], high_precision: str) -> None:
        """Take what the observer saw; a converted layer whose ledger is empty (compiled code keeps none) is counted by shape.

        ``high_precision`` is what layers run in that nobody observed.
        """
        self.observed = {name: seen for name, seen in observed.items() if seen.calls}
        self.high_precision = high_precision
        for gemm in [gemm for gemm in self.converted if not self.ledgers[gemm.name].flops]:
            self.converted.remove(gemm)
            self.static.append(gemm)
            del self.ledgers[gemm.name]

    def read_ledgers(self) -> tuple[Counter[str], Counter[str]]:
        """FLOPs by precision since the model was converted: ``(model, recomputed)``."""
        model: Counter[str] = Counter()
        again: Counter[str] = Counter()
        for ledger in self.ledgers.values():
            for (_, precision), count in ledger.flops.items():
                model[precision] += count
            for (_, precision), count in ledger.recomputed_flops.items():
                again[precision] += count
        return model, again

    def take_batch(self, batch: Any, tokens: Tokens) -> None:
        """Add one batch of this device to ``tokens``.

        Raises:
            ValueError: The batch does not say how many tokens it has.
        """
        ids = batch.get("input_ids", batch.get("inputs_embeds")) if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor) or ids.dim() < 2:
            raise ValueError(
                f"mfu_monitor reads input_ids [batch, sequence] from the batch; this one is a {type(batch).__name__} without."
            )
        rows, length = ids.shape[:2]
        tokens.computed += rows * length
        mask, documents = batch.get("attention_mask"), documents_of(batch, rows, length)
        if (isinstance(mask, Tensor) and mask.dim() != 2) or (
            mask is not None and mask.device.type == "cpu" and bool(mask.all())
        ):
            mask = None
        tokens.real = tokens.real + (rows * length if mask is None else _count(mask))
        for key in self.masks:
            window, causal, packed, chunk = key
            own = documents if packed else None
            if mask is None and own is None:
                found: int | Tensor = rows * attended_pairs(length, window, causal, chunk)
            else:
                own = in_chunks(own, ids if mask is None else mask, chunk)
                found = packed_pairs(window, documents=own, mask=mask, causal=causal)
            tokens.pairs[key] = tokens.pairs[key] + found

    def static_flops(self, tokens: Tokens) -> Flops:
        """FLOPs of what has no ledger: attention, heads, layers that were not converted."""
        flops = Flops()
        for gemm in self.static:
            seen = self.observed.get(gemm.name)
            weight = getattr(self.modules.get(gemm.name), "weight", None)
            if isinstance(weight, nn.Parameter):  # which may have been frozen since
                gemm = dataclasses.replace(gemm, wgrad=weight.requires_grad)
            if seen is not None:
                gemm = dataclasses.replace(gemm, dgrad=seen.dgrad, share=gemm.share * seen.share)
            for which, count in gemm.flops(tokens.computed).items():
                flops.model[self._precision(gemm, which, seen)] += count
            if seen is not None and seen.recomputed:
                count = gemm.per_token * tokens.computed * seen.recompute_ratio
                flops.recomputed[self._precision(gemm, "fprop", seen)] += count
        for shape in self.attention:
            seen = self.observed.get(shape.name)
            precision = self.high_precision if seen is None else self._tf32(seen.precision)
            high, share = False, 1 if seen is None else seen.share
            served = self.fp8_attention.get(shape.name)
            if served is not None and served.recipe is not None:
                precision, high = "fp8", served.grad_scores != "fp8"
            forward = shape.forward_flops(float(tokens.pairs[shape.mask])) * share
            backward = forward * (2 if seen is None or seen.backward else 0)
            flops.model[precision] += forward + backward / 2  # of the backward: dV, dS
            flops.model["bf16" if high else precision] += backward / 2  # dQ, dK
            flops.attention += forward + backward
            if seen is not None:
                flops.recomputed[precision] += forward * seen.recompute_ratio
        return flops

    def _precision(self, gemm: Gemm, which: str, seen: Observed | None) -> str:
        asked = getattr(self.modules.get(gemm.name), "gemm_precisions", None)
        if asked is not None:  # converted, but compiled
            return asked(self.high_precision)[which]
        return self.high_precision if seen is None else self._tf32(seen.precision)

    def _tf32(self, precision: str) -> str:
        tf32 = torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32
        return "tf32" if precision == "fp32" and tf32 else precision


def _count(mask: Tensor) -> int | Tensor:
    total = mask.sum()
    return int(total) if mask.device.type == "cpu" else total
