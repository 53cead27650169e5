"""What the monitors move through memory in a due batch of Llama-3 8B at 8192 tokens, counted operation by operation.

The functions that the monitors run are run on tensors of those shapes without memory (torch's meta device), and the bytes that every
operation reads and writes are added up, as torch runs them one by one on a GPU. No GPU is needed, and nothing is timed: the share of
a step is those bytes at the given bandwidth over the step's operations at the given speed. What launching the operations costs the
host is the last figure, their number.

    python benchmarks/monitor_bytes.py [--interval 10] [--bandwidth 2.8e12] [--flops 4e14]
"""

from __future__ import annotations

import argparse

import torch
from foundry_fp8.observe.divergence.attention_watch import ATTENTION_OPERANDS, Look
from torch.utils._python_dispatch import TorchDispatchMode

from foundry_fp8.backends.emulated.attention import EmulatedAttention
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.numerics.formats import E4M3
from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.numerics.recipes import CurrentScaling
from foundry_fp8.observe.kurtosis import kurtosis_per_sample, kurtosis_per_token, row_sums, sample_tokens
from foundry_fp8.observe.operand_health import Products, Seen

TOKENS, LAYERS, WIDTH, INNER, KV, PARAMETERS = 8192, 32, 4096, 14336, 1024, 8.03e9
LINEARS = [
    (WIDTH, WIDTH),
    (WIDTH, KV),
    (WIDTH, KV),
    (WIDTH, WIDTH),
    (WIDTH, INNER),
    (WIDTH, INNER),
    (INNER, WIDTH),
]
"""``(in_features, out_features)`` of one block."""
ROLES = [[WIDTH], [WIDTH], [WIDTH, KV, KV], [WIDTH], [KV], [INNER, INNER], [INNER], [WIDTH]]
"""Features of what ``kurtosis_monitor`` looks at in one block."""


SECTOR = 32
"""Bytes that reading one element of a column moves."""


class Traffic(TorchDispatchMode):
    """Adds up what each operation reads and writes; views move nothing, and of what is gathered from only what is taken is read."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not any(value.alias_info for value in func._schema.returns):
            self.operations += 1
            leaves = torch.utils._pytree.tree_leaves([args, kwargs, out])
            if func is torch.ops.aten.index_select.default:
                leaves = leaves[1:]
                self.bytes += out.numel() * (SECTOR if args[1] else out.element_size())
            self.bytes += sum(x.numel() * x.element_size() for x in leaves if isinstance(x, torch.Tensor))
        return out


def model(products: bool) -> None:
    """All linears, as fp8_monitor and the guard share them; of the guard alone their products."""
    found = Products()
    for block in range(LAYERS):
        for place, (k, n) in enumerate(LINEARS):
            linear(f"{block}.{place}", k, n, found if products else None)
    found.tensors()


def linear(name: str, k: int, n: int, products: Products | None) -> None:
    """The three operands of one linear."""
    for operand, rows, columns in (("x", TOKENS, k), ("w", n, k), ("dy", TOKENS, n)):
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
        scale = torch.empty((), device="meta")
        seen = Seen(x, Quantized(x.to(torch.float8_e4m3fn), scale, None, E4M3, scale))
        _ = seen.row
        if products is not None:
            products.take(name, operand, seen, wgrad=True)


def attention(heads: int = 32, kv_heads: int = 8, size: int = 128) -> None:
    """One attention, as the guard looks at it where it runs FP8: forward, and what comes back."""
    q, k, v, out, do = (
        torch.empty(1, n, TOKENS, size, dtype=torch.bfloat16, device="meta")
        for n in (heads, kv_heads, kv_heads, heads, heads)
    )
    module = FP8DotProductAttention(fqn="attention", recipe=CurrentScaling(), backend=EmulatedAttention())
    look = Look(module, None, dict.fromkeys(ATTENTION_OPERANDS))
    look.see_forward(q, k, v, AttentionMask(causal=True), 1.0, out)
    look.see_gradient(do, 1)


def role(features: list[int]) -> None:
    """What kurtosis_monitor does with one role."""
    tokens = None
    for count in features:
        x = torch.empty(1, TOKENS, count, dtype=torch.bfloat16, device="meta")
        tokens = sample_tokens(x, 2) if tokens is None else tokens
        s2, s4, _ = row_sums(x, 2, tokens)
    assert tokens is not None
    kurtosis_per_token(s2, s4, sum(features), tokens.weight)
    kurtosis_per_sample(s2, s4, sum(features), tokens.weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--bandwidth", type=float, default=2.8e12, help="bytes a second that are reached")
    parser.add_argument("--flops", type=float, default=4e14, help="operations a second that training reaches")
    args = parser.parse_args()
    # 6 a parameter and token, and causal attention.
    step = (6 * PARAMETERS * TOKENS + 6 * LAYERS * TOKENS**2 * WIDTH) / args.flops
    parts = {
        "fp8_monitor": lambda: model(False),
        "divergence_guard": lambda: model(True),
        "its attentions": lambda: [attention() for _ in range(LAYERS)],
        "kurtosis_monitor": lambda: [role(features) for _ in range(LAYERS) for features in ROLES],
    }
    print(f"one microbatch of {TOKENS} tokens, a step of {step * 1e3:.0f} ms, interval {args.interval}")
    for name, run in parts.items():
        run()  # what is made once
        with Traffic() as traffic:
            run()
        moved = traffic.bytes
        # The cast that makes the FP8 tensor is the layer's own.
        if name in ("fp8_monitor", "divergence_guard"):
            moved -= LAYERS * sum(3 * (TOKENS * k + n * k + TOKENS * n) for k, n in LINEARS)
        share = moved / args.bandwidth / args.interval / step
        if name == "divergence_guard":  # which looks at one linear in turn in the batches between
            share *= 1 + (args.interval - 1) / (LAYERS * len(LINEARS))
        print(f"  {name:18s}{moved / 1e9:8.0f} GB  {share:7.2%}  {traffic.operations:8d} operations")


if __name__ == "__main__":
    main()
