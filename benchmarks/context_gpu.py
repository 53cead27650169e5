"""Long contexts: tokens/s of a training step from 4k to 64k tokens with attention in BF16 and in FP8 (FOG's tables 2 to 4), and attention alone.

    python benchmarks/context_gpu.py [--models fog-1.5b] [--layers 2] [--contexts 4096 ... 65536] [--save context_h100_2026-11-21]

One causal sequence a step. "bf16" is torch's fused attention between BF16 linears; every other case has the linears in FP8, delayed, and attention
in BF16, or by cuDNN in FP8: through its Python frontend (native), or through Transformer Engine, where each is installed and takes it.
"speedup" is over "bf16" at that context; "TFLOPS" counts causal attention in half. Attention alone is forward and backward from BF16
Q, K and V, their quantisation included. Needs torch 2.7 or later.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_common import DEVICE, SMOKE, finish, machine, parser, prepared, require_device, timed
from step_gpu import BLOCKS, SMOKE_BLOCKS, Block, Shape, training_step
from torch import Tensor, nn

import foundry_fp8
from foundry_fp8.backends import load_backend
from foundry_fp8.numerics.recipes import DelayedScaling
from foundry_fp8.surgery.attention import plan_attention

CONTEXTS = (48, 80) if SMOKE else (4096, 8192, 16384, 32768, 65536)
ATTENTION: dict[str, dict[str, Any]] = {
    "fp8 linears": {"backend": "native", "attention": False},
}
if not SMOKE and importlib.util.find_spec("cudnn") is not None:
    ATTENTION["native fp8 attention"] = {"backend": "native", "attention": True}
if not SMOKE and importlib.util.find_spec("transformer_engine_torch") is not None:
    ATTENTION["transformer_engine fp8 attention"] = {"backend": "transformer_engine", "attention": True}


class Attention(nn.Module):
    """Heads side by side through torch's attention, and nothing else."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        self.head_dim = shape.head_dim

    def forward(self, qkv: Tensor) -> Tensor:
        """``[1, T, (heads + 2 kv_heads) * head_dim]`` to ``[1, T, heads * head_dim]``."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in qkv.split(self.sizes, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


def models(make: Callable[[], nn.Module], linears: bool) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """(name, what makes the model of that case)."""

    def converted(backend: str, attention: bool) -> nn.Module:
        model = make()
        if linears:
            foundry_fp8.apply_fp8(model, recipe="delayed", backend=backend, device=DEVICE)
        if attention:
            plan_attention(
                model,
                recipe=DelayedScaling(),
                runner=load_backend(backend).attention(),
            ).carry_out(model)
        return model

    yield "bf16", make
    for name, options in ATTENTION.items():
        if linears or options["attention"]:
            yield name, functools.partial(converted, **options)


def measure(
    group: str, make: Callable[[], nn.Module], x: Tensor, flops: float, repeats: int, *, linears: bool
) -> list[dict[str, Any]]:
    """Rows of one context; the cases in turn, so that ratios are within one run."""
    cases, memory, failed = prepared(
        models(make, linears),
        lambda model: training_step(model, x, optimize=linears),
        warmup=2,  # the first sets the scales
    )
    rows: list[dict[str, Any]] = [
        {"group": group, "variant": name, "failed": why} for name, why in failed.items()
    ]
    found = timed(cases, repeats)
    for name, time in found.items():
        row = {"group": group, "variant": name, "tokens": x.shape[1], "ms": time.seconds * 1e3}
        row |= {"tokens/s": x.shape[1] / time.seconds, "TFLOPS": flops / time.seconds / 1e12}
        if "bf16" in found:
            row["speedup"] = found["bf16"].seconds / time.seconds
        if name in memory:
            row["peak GiB"] = memory[name]
        rows.append(row | {"spread": time.spread})
    return rows


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=1 if SMOKE else 2)
    arguments.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    options = arguments.parse_args()
    require_device()
    blocks = SMOKE_BLOCKS if SMOKE else BLOCKS
    rows = []
    for name in options.models or (("smoke",) if SMOKE else ("fog-1.5b", "llama3-8b")):
        shape = blocks[name]
        for context in options.contexts:
            attention = 3.0 * shape.attention_flops(context)
            linear = 6.0 * context * shape.linear_parameters()

            def given(features: int, context: int = context) -> Tensor:
                return torch.randn(1, context, features, device=DEVICE).bfloat16().requires_grad_()

            rows += measure(
                f"{name} attention alone, {context} tokens",
                lambda shape=shape: Attention(shape),
                given(shape.head_dim * (shape.heads + 2 * shape.kv_heads)),
                attention,
                options.repeats,
                linears=False,
            )
            rows += measure(
                f"{name} training step, {options.layers} blocks, {context} tokens",
                lambda shape=shape: nn.Sequential(*(Block(shape) for _ in range(options.layers))).to(
                    DEVICE, torch.bfloat16
                ),
                given(shape.hidden),
                (linear + attention) * options.layers,
                options.repeats,
                linears=True,
            )
    finish(options.save, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
