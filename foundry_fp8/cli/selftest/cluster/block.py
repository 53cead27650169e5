"""Blocks of Llama-3 8B: BF16 against each recipe, with the ratio that the size rule predicts."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import foundry_fp8
from foundry_fp8.backends.size_rule import saved_seconds
from foundry_fp8.cli.selftest.cluster.model import llama, recipes
from foundry_fp8.cli.selftest.cluster.ranks import Ranks
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.recipes import RECIPES
from foundry_fp8.observe.flops.peaks import peaks_of

__all__ = ["block"]

LLAMA_3_8B = {
    "vocab_size": 1024,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
TOKENS = (2, 4096)
ROUNDS = 7


def block(ranks: Ranks) -> None:
    """Forward and backward of two blocks, in turn, medians. In a dry run of a small model, whose times say nothing."""
    shape = (2, 32) if ranks.dry else TOKENS
    ids = torch.randint(0, 256, shape).to(ranks.device)
    models: dict[str, nn.Module] = {}
    for name in ("bf16", *recipes(ranks)):
        models[name] = llama(ranks, **({} if ranks.dry else LLAMA_3_8B))
        if name != "bf16":
            foundry_fp8.apply_fp8(models[name], recipe=name, backend="emulated" if ranks.dry else "native")
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(ROUNDS + 1):
        for name, model in models.items():
            took = _time(ranks, model, ids)
            if number:  # the first compiles
                seconds[name].append(took)
    base = statistics.median(seconds["bf16"])
    mfu = _mfu(ranks, models["bf16"], ids, base)
    for name, model in models.items():
        if name == "bf16":
            continue
        speed = statistics.median(b / o for b, o in zip(seconds["bf16"], seconds[name], strict=True))
        linears = [m for m in model.modules() if isinstance(m, FP8Linear)]
        saved = sum(
            saved_seconds(RECIPES[name](), ids.numel(), m.in_features, m.out_features) for m in linears
        )
        figures = f"{speed:.2f} x BF16, predicted {base / (base - saved):.2f} x; BF16 {mfu}"
        if ranks.dry:
            figures = "a small model on a CPU: times say nothing"
        ranks.check(f"blocks of Llama-3 8B, {name}", speed > 1 or ranks.dry, figures)


def _time(ranks: Ranks, model: nn.Module, ids: torch.Tensor) -> float:
    ranks.wait()
    started = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)
    ranks.wait()
    return time.perf_counter() - started


def _mfu(ranks: Ranks, model: nn.Module, ids: torch.Tensor, seconds: float) -> str:
    if ranks.device.type == "cpu":
        return ""
    peaks = peaks_of(torch.cuda.get_device_name(ranks.device))
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    layers, hidden = 2, LLAMA_3_8B["hidden_size"]
    flops = 6 * ids.numel() * linear + 6 * layers * ids.numel() * ids.shape[1] * hidden  # causal attention
    if peaks is None:
        return f"{flops / seconds / 1e12:.0f} TFLOP/s"
    return f"MFU {flops / seconds / peaks.of('bf16'):.0%}"
